//! Draws the screen of `affinode top`: the GPUs, the containers, and one line of help.

use affinode_controller::{clock, schema};
use ratatui::{
    Frame,
    layout::{Constraint, Layout},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Cell, Paragraph, Row, Table, TableState},
};

use super::state::TopState;
use crate::{format, local_node::NOTHING_RUNS};

/// Returns the colour of a container's state. The dashboard uses the same colours.
fn colour(state: &str) -> Color {
    match state {
        "Active" => Color::Green,
        "Idle" => Color::Yellow,
        "Offloaded" => Color::Blue,
        "Closing" | "Offloading" | "Restoring" => Color::Magenta,
        "Queued" | "Lost" => Color::Red,
        _ => Color::DarkGray,
    }
}

/// Draws the whole screen of `affinode top` from its state.
pub fn draw(frame: &mut Frame<'_>, state: &TopState) {
    let gpus = u16::try_from(state.node.gpus.len().max(1)).unwrap_or(u16::MAX);
    let [head, list, foot] = Layout::vertical([
        Constraint::Length(gpus.saturating_add(1)),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(header(&state.node, head.width)), head);
    let rows = state.rows();
    let now_ms = clock::unix_ms();
    let widths = [
        Constraint::Fill(2),
        Constraint::Length(18),
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(11),
        Constraint::Length(9),
        Constraint::Fill(3),
    ];
    let titles = ["CONTAINER", "STATE", "FOR", "VRAM", "IN HOST RAM", "LAST WAKE", "REASON"];
    let table = Table::new(rows.iter().map(|c| row(c, now_ms)), widths)
        .header(Row::new(titles).style(Style::new().add_modifier(Modifier::DIM)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let chosen = (!rows.is_empty()).then(|| state.position());
    frame.render_stateful_widget(table, list, &mut TableState::default().with_selected(chosen));
    if rows.is_empty() {
        let below = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]);
        let [_, below] = below.areas(list);
        frame.render_widget(Paragraph::new(nothing(&state.node)), below);
    }
    frame.render_widget(Paragraph::new(help(state)), foot);
}

/// Returns the sentence that the screen shows if there is no row.
fn nothing(node: &schema::Node) -> &'static str {
    match node.containers.is_empty() {
        false => "no container matches",
        true if node.controller_pid == 0 => NOTHING_RUNS,
        true => "no GPU container of runtime affinode runs",
    }
}

fn header(node: &schema::Node, width: u16) -> Vec<Line<'static>> {
    let error = |error| Line::from(format!("GPUs cannot be read: {}", format::safe(error)));
    let error = node.gpu_error.as_deref().map(error);
    let bar_width = usize::from(width.saturating_sub(70)).clamp(10, 40);
    let line = |gpu: &schema::Gpu| {
        let total = gpu.vram_total_bytes.max(1);
        let part = |bytes: u64| {
            usize::try_from(bytes.saturating_mul(bar_width as u64) / total).unwrap_or(bar_width)
        };
        let used = part(gpu.vram_used_bytes).min(bar_width);
        Line::from(vec![
            Span::raw(format!("GPU {} ", gpu.index)),
            Span::styled("█".repeat(used), Style::new().fg(Color::Green)),
            Span::styled("░".repeat(bar_width - used), Style::new().add_modifier(Modifier::DIM)),
            Span::raw(format!(
                " {} of {}, {} offloaded, {}% busy  {}",
                format::bytes(gpu.vram_used_bytes),
                format::bytes(gpu.vram_total_bytes),
                format::bytes(gpu.vram_reclaimed_bytes),
                gpu.utilization_percent,
                format::safe(&gpu.name),
            )),
        ])
    };
    node.gpus.iter().map(line).chain(error).collect()
}

fn row(c: &schema::Container, now_ms: i64) -> Row<'static> {
    let since = u64::try_from(now_ms.saturating_sub(c.since_unix_ms)).unwrap_or(0);
    let wake = if c.restores == 0 { "-".into() } else { format!("{} ms", c.last_wake_ms) };
    let state = if c.pinned { format!("{}, pinned", c.state) } else { c.state.clone() };
    Row::new(vec![
        Cell::from(format::safe(&c.name)),
        Cell::from(state).style(Style::new().fg(colour(&c.state))),
        Cell::from(format::duration(since)),
        Cell::from(format::bytes(c.vram_bytes)),
        Cell::from(format::offloaded(c.offloaded_bytes, c.disk_bytes)),
        Cell::from(wake),
        Cell::from(format::safe(&c.reason_text)),
    ])
}

fn help(state: &TopState) -> Line<'static> {
    if state.typing {
        return Line::from(format!(
            "/{}▏ Enter keeps the filter, Esc clears it",
            format::safe(&state.filter)
        ));
    }
    let keys =
        format!("q quit  o offload  r restore  p pin  s sort: {}  / filter", state.sort.word());
    Line::from(vec![
        Span::styled(keys, Style::new().add_modifier(Modifier::DIM)),
        Span::raw(format!("  {}", state.message)),
    ])
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;

    #[test]
    fn the_screen_shows_gpus_and_reasons() {
        let gpu = schema::Gpu {
            name: "H200".into(),
            vram_total_bytes: 100 << 30,
            vram_used_bytes: 50 << 30,
            ..Default::default()
        };
        let container = schema::Container {
            name: "ml/note\u{1b}book".into(),
            state: "Offloaded".into(),
            reason_text: "made no CUDA call".into(),
            ..Default::default()
        };
        let mut state = TopState::default();
        state.show(schema::Node {
            gpus: vec![gpu],
            containers: vec![container],
            ..Default::default()
        });
        let mut terminal = Terminal::new(TestBackend::new(120, 8)).unwrap();
        terminal.draw(|frame| draw(frame, &state)).unwrap();
        let screen = terminal.backend().to_string();
        for text in [
            "GPU 0 ",
            "50.0 GiB of 100.0 GiB",
            "ml/note?book",
            "Offloaded",
            "made no CUDA call",
            "q quit",
        ] {
            assert!(screen.contains(text), "{text} is not in\n{screen}");
        }
    }

    #[test]
    fn an_empty_node_says_that_nothing_runs() {
        let mut state = TopState::default();
        let mut terminal = Terminal::new(TestBackend::new(120, 8)).unwrap();
        let mut screen = |state: &TopState| {
            terminal.draw(|frame| draw(frame, state)).unwrap();
            terminal.backend().to_string()
        };
        assert!(screen(&state).contains("and no controller"));
        state.show(schema::Node { controller_pid: 1, ..Default::default() });
        let served = screen(&state);
        assert!(served.contains("no GPU container of runtime affinode runs  "), "{served}");
        let containers = vec![schema::Container::default()];
        state.show(schema::Node { containers, ..Default::default() });
        state.filter = "another".into();
        assert!(screen(&state).contains("no container matches"));
    }
}
