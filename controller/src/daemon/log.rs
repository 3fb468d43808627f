//! Configures the destination of the log: standard error, or systemd's journal. If a shim has
//! started the controller, standard error is `controller.log` in the run directory
//! ([`super::log_file`]).

use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

use super::log_file::LogOutput;
use crate::config::{LogFormat, LogSection};

/// Starts logging as configured. If systemd's journal is configured but not available, log lines
/// are written to standard error.
pub fn begin(log: &LogSection) {
    let filter = || EnvFilter::try_new(&log.level).unwrap_or_else(|_| EnvFilter::new("info"));
    let journal = (log.format == LogFormat::Journald).then(tracing_journald::layer);
    // `try_init` fails only if a test has already installed a logger.
    let _ = match journal {
        Some(Ok(journal)) => {
            let journal = journal
                .with_syslog_identifier("affinode".into())
                .with_field_prefix(Some("AFFINODE".into()));
            let _ = tracing_subscriber::registry().with(filter()).with(journal).try_init();
            return;
        }
        None if log.format == LogFormat::Json => lines(filter()).json().try_init(),
        None => lines(filter()).try_init(),
        Some(Err(error)) => {
            let begun = lines(filter()).try_init();
            tracing::error!(%error, "controller: cannot connect to systemd's journal, so the log goes to standard error");
            begun
        }
    };
}

type Lines = tracing_subscriber::fmt::SubscriberBuilder<
    tracing_subscriber::fmt::format::DefaultFields,
    tracing_subscriber::fmt::format::Format,
    EnvFilter,
    LogOutput,
>;

fn lines(filter: EnvFilter) -> Lines {
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(LogOutput::standard_error())
        .with_ansi(false)
}
