//! Writes log messages in the form of crun and runc: to the file of `--log`, as text or as JSON, or
//! else to stderr. Only warnings and errors are written, because the container engine shows the
//! content of the file, and the stderr of `create` is the container's stderr.

use std::fs::OpenOptions;
use std::sync::Mutex;

use serde_json::json;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::cli::LogTarget;

/// The format of log lines, as an OCI runtime writes them.
struct OciFormat {
    json: bool,
}

/// Installs the logger for this process. If the file cannot be opened, messages go to stderr.
pub fn init(target: &LogTarget) {
    let format = OciFormat { json: target.json };
    let builder = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::WARN)
        .log_internal_errors(false)
        .event_format(format);
    let file = target
        .file
        .as_ref()
        .and_then(|path| OpenOptions::new().append(true).create(true).open(path).ok());
    // Fails if a logger is installed already, which happens in tests.
    let _ = match file {
        Some(file) => builder.with_writer(Mutex::new(file)).try_init(),
        None => builder.with_writer(std::io::stderr).try_init(),
    };
}

impl<S, N> FormatEvent<S, N> for OciFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let (mut text, mut time) = (String::new(), String::new());
        context.field_format().format_fields(Writer::new(&mut text), event)?;
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let level = if *event.metadata().level() == Level::ERROR { "error" } else { "warning" };
        let text = format!("affinode: {text}");
        if self.json {
            writeln!(writer, "{}", json!({"level": level, "msg": text, "time": time}))
        } else {
            writeln!(writer, "time={time:?} level={level} msg={text:?}")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn written(file: &Path, json: bool) -> String {
        let format = OciFormat { json };
        let open = OpenOptions::new().append(true).create(true).open(file).unwrap();
        let logger = tracing_subscriber::fmt()
            .with_max_level(LevelFilter::WARN)
            .event_format(format)
            .with_writer(Mutex::new(open))
            .finish();
        tracing::subscriber::with_default(logger, || {
            tracing::info!("not shown");
            tracing::warn!(key = "k", "container a: runs unmanaged: \"why\"");
        });
        std::fs::read_to_string(file).unwrap()
    }

    #[test]
    fn lines_are_those_of_a_runtime() {
        let dir = tempfile::tempdir().unwrap();
        let text = written(&dir.path().join("json"), true);
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["level"], "warning");
        let said = line["msg"].as_str().unwrap();
        assert!(said.starts_with("affinode: container a: runs unmanaged: \"why\""), "{said}");
        let text = written(&dir.path().join("text"), false);
        assert!(text.starts_with("time=\"2") && text.contains(" level=warning msg=\""), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}
