//! Shows the progress of a move: a bar with rate and remaining time. The bar appears only on a
//! terminal, and only if the move takes some time.

use std::{
    future::Future,
    io::IsTerminal,
    time::{Duration, Instant},
};

use affinode_controller::schema::{Container, Node};
use indicatif::{ProgressBar, ProgressStyle};

use super::{client::ControlClient, format};

/// Duration of a move after which the progress bar appears.
const SOON: Duration = Duration::from_millis(600);
/// Time between two polls of the controller.
const LOOK: Duration = Duration::from_millis(250);
const STYLE: &str = "{prefix} {wide_bar} {binary_bytes} of {binary_total_bytes}{msg}";

/// Direction of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveDirection {
    /// An offload, to host memory.
    Offload,
    /// A restore, to the GPU.
    Restore,
}

/// VRAM and host memory of a container at the time of one reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SeenProgress {
    vram_bytes: u64,
    offloaded_bytes: u64,
    /// Anonymous host memory of the container's processes. It includes memory that the driver
    /// checkpointed.
    host_bytes: u64,
}

/// Waits until a move has ended, and shows its progress in the meantime.
pub async fn during<T>(
    client: &ControlClient,
    name: &str,
    way: MoveDirection,
    moved: impl Future<Output = T>,
) -> T {
    if !std::io::stderr().is_terminal() {
        return moved.await;
    }
    let before = look(client, name).await;
    let began = Instant::now();
    let mut bar: Option<ProgressBar> = None;
    tokio::pin!(moved);
    loop {
        match tokio::time::timeout(LOOK, &mut moved).await {
            Ok(ended) => {
                if let Some(bar) = bar {
                    bar.finish_and_clear();
                }
                return ended;
            }
            Err(_) if began.elapsed() < SOON => {}
            Err(_) => {
                let Some(((_, before), (state, now))) =
                    before.as_ref().zip(look(client, name).await)
                else {
                    continue;
                };
                let total = total(way, *before);
                let bar = bar.get_or_insert_with(|| drawn(total));
                let moved = done(way, *before, now);
                bar.set_prefix(state);
                bar.set_message(pace(moved, total, began.elapsed()));
                bar.set_position(moved);
            }
        }
    }
}

fn drawn(total: u64) -> ProgressBar {
    let style =
        ProgressStyle::with_template(STYLE).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}

/// Returns the number of bytes that the move transfers in total.
fn total(way: MoveDirection, before: SeenProgress) -> u64 {
    match way {
        MoveDirection::Offload => before.vram_bytes,
        MoveDirection::Restore => before.offloaded_bytes,
    }
}

/// Returns the number of bytes that the move has transferred so far. The driver reports no
/// progress, so the number is computed from how VRAM and host memory have changed since the start
/// of the move.
fn done(way: MoveDirection, before: SeenProgress, now: SeenProgress) -> u64 {
    let seen = match way {
        MoveDirection::Offload => {
            let left = before.vram_bytes.saturating_sub(now.vram_bytes);
            left.max(now.host_bytes.saturating_sub(before.host_bytes)).max(now.offloaded_bytes)
        }
        MoveDirection::Restore => {
            let left = before.host_bytes.saturating_sub(now.host_bytes);
            left.max(now.vram_bytes.saturating_sub(before.vram_bytes))
        }
    };
    seen.min(total(way, before))
}

/// Formats the rate and the remaining time of a move. The text is empty before the first byte and
/// at the end.
fn pace(moved: u64, total: u64, elapsed: Duration) -> String {
    if moved == 0 || moved >= total {
        return String::new();
    }
    let per_second = moved as f64 / elapsed.as_secs_f64().max(0.001);
    let left_ms = 1000.0 * (total - moved) as f64 / per_second;
    format!(", {}/s, {} left", format::amount(per_second as u64), format::duration(left_ms as u64))
}

async fn look(client: &ControlClient, name: &str) -> Option<(String, SeenProgress)> {
    let node = Node::from(client.list().await.ok()?);
    let container = find(&node, name)?;
    let host_bytes = container.processes.iter().map(|p| anonymous_bytes(p.pid)).sum();
    let seen = SeenProgress {
        vram_bytes: container.vram_bytes,
        offloaded_bytes: container.offloaded_bytes,
        host_bytes,
    };
    Some((container.state.clone(), seen))
}

/// Finds the container that the controller would select for this name.
fn find<'a>(node: &'a Node, name: &str) -> Option<&'a Container> {
    let whole = |c: &&Container| c.key == name || c.id == name || c.name == name;
    let begins =
        |c: &&Container| [&c.key, &c.id, &c.pod, &c.name].iter().any(|k| k.starts_with(name));
    node.containers.iter().find(whole).or_else(|| node.containers.iter().find(begins))
}

fn anonymous_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(vram_bytes: u64, offloaded_bytes: u64, host_bytes: u64) -> SeenProgress {
        SeenProgress { vram_bytes, offloaded_bytes, host_bytes }
    }

    #[test]
    fn progress_never_exceeds_the_total() {
        let before = seen(100, 0, 7);
        assert_eq!(done(MoveDirection::Offload, before, before), 0);
        assert_eq!(
            done(MoveDirection::Offload, before, seen(100, 0, 37)),
            30,
            "the driver fills host memory"
        );
        assert_eq!(done(MoveDirection::Offload, before, seen(60, 0, 7)), 40, "the GPU is emptied");
        assert_eq!(done(MoveDirection::Offload, before, seen(0, 100, 200)), 100);
        let before = seen(0, 100, 107);
        assert_eq!(done(MoveDirection::Restore, before, before), 0);
        assert_eq!(done(MoveDirection::Restore, before, seen(55, 100, 107)), 55);
        assert_eq!(done(MoveDirection::Restore, before, seen(0, 100, 47)), 60);
    }

    #[test]
    fn the_pace_is_that_of_the_whole_move() {
        let pace = |moved| pace(moved, 40 << 30, Duration::from_secs(5));
        assert_eq!(pace(10 << 30), ", 2.0 GiB/s, 15s left");
        assert_eq!([pace(0), pace(40 << 30)], ["", ""]);
    }

    #[test]
    fn the_bar_can_be_drawn_and_memory_is_read() {
        assert!(ProgressStyle::with_template(STYLE).is_ok());
        assert!(anonymous_bytes(std::process::id()) > 0);
    }

    #[test]
    fn a_full_name_wins_over_a_prefix() {
        let named =
            |id: &str| Container { id: id.into(), name: format!("ns/{id}"), ..Default::default() };
        let node = Node { containers: vec![named("ab"), named("a")], ..Default::default() };
        assert_eq!(find(&node, "a").unwrap().id, "a");
        assert_eq!(find(&node, "ns/ab").unwrap().id, "ab");
        assert!(find(&node, "x").is_none());
    }
}
