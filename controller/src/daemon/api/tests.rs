use std::sync::mpsc as blocking;

use super::*;
use crate::config::{ConfigError, ReloadedConfig};

fn service() -> (ControlService, mpsc::Receiver<Command>) {
    let (calls, asked) = mpsc::channel(8);
    let (events, hub) = (Arc::new(EventLog::default()), Arc::new(CallTraceHub::default()));
    (ControlService::new(calls, events, hub, None, ReportSection::default()), asked)
}

/// Reads a configuration from a disk that stalls until `disk` has a message.
fn read_from(
    disk: blocking::Receiver<()>,
    node_name: &'static str,
) -> impl FnOnce() -> Result<Config, ConfigError> {
    move || {
        let _ = disk.recv();
        let mut config = Config::default();
        config.jobs.users.push(node_name.into());
        Ok(config)
    }
}

#[tokio::test]
async fn a_stalled_configuration_delays_no_command() {
    let (service, mut asked) = service();
    let (disk, stalled) = blocking::channel();
    let (first, second) = (service.clone(), service.clone());
    let first =
        tokio::spawn(
            async move { first.configure(read_from(stalled, "first"), Command::Reload).await },
        );
    while service.configuring.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    let (_, ready) = blocking::channel();
    let second =
        tokio::spawn(
            async move { second.configure(read_from(ready, "second"), Command::Reload).await },
        );
    let listed = tokio::spawn(async move { service.ask(Command::List).await });
    let Some(Command::List(answer)) = asked.recv().await else { panic!("no list") };
    answer.send(ListResponse::default()).unwrap();
    listed.await.unwrap().unwrap();
    disk.send(()).unwrap();
    // The actor gets the configurations in the order in which they were read.
    for name in ["first", "second"] {
        let Some(Command::Reload(config, answer)) = asked.recv().await else { panic!("{name}") };
        assert_eq!(config.jobs.users, [name]);
        answer.send(ReloadedConfig::default()).unwrap();
    }
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_invalid_configuration_is_not_sent() {
    let (service, mut asked) = service();
    let read = || Err(ConfigError::Bad("policy.mode: unknown".into()));
    let error = service.configure(read, Command::Reload).await.unwrap_err();
    assert!(error.to_string().contains("policy.mode"), "{error}");
    assert!(asked.try_recv().is_err());
    assert_eq!(service.configuring.available_permits(), 1);
}
