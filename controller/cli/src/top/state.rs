//! State of the screen of `affinode top`, and the effect of each key. This module does no I/O.

use affinode_controller::schema;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::format;

/// Action that the caller must carry out after a key press.
#[derive(Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// Draw the screen again.
    Stay,
    /// Close the screen and end the program.
    End,
    /// Send a request for a container to the controller.
    Act {
        /// Display name of the container.
        container: String,
        key: String,
        what: ContainerAction,
    },
}

/// Action that a key press requests for a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerAction {
    Offload,
    Restore,
    /// Pin the container (`true`) or unpin it (`false`).
    Pin(bool),
}

/// The column by which rows are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SortColumn {
    #[default]
    Name,
    State,
    /// VRAM in use, with the largest value first.
    Vram,
    /// Offloaded VRAM, with the largest value first.
    HostRam,
    /// Time without a CUDA call, with the longest time first.
    Idle,
}

impl SortColumn {
    /// Returns the name of the column, for the help line.
    pub fn word(self) -> &'static str {
        match self {
            SortColumn::Name => "name",
            SortColumn::State => "state",
            SortColumn::Vram => "VRAM",
            SortColumn::HostRam => "host RAM",
            SortColumn::Idle => "idle",
        }
    }

    fn next(self) -> SortColumn {
        match self {
            SortColumn::Name => SortColumn::State,
            SortColumn::State => SortColumn::Vram,
            SortColumn::Vram => SortColumn::HostRam,
            SortColumn::HostRam => SortColumn::Idle,
            SortColumn::Idle => SortColumn::Name,
        }
    }
}

/// All data that the screen of `affinode top` shows.
#[derive(Debug, Default)]
pub struct TopState {
    /// The node at the last update.
    pub node: schema::Node,
    pub sort: SortColumn,
    /// Filter text. A row is shown if its name, state or reason contains this text.
    pub filter: String,
    /// Whether key presses are added to the filter text.
    pub typing: bool,
    /// Text of the last line, such as the latest response of the controller.
    pub message: String,
    /// Key of the selected container. The container stays selected when rows move.
    pub chosen: String,
}

impl TopState {
    /// Replaces the state of the node that is shown.
    pub fn show(&mut self, node: schema::Node) {
        self.node = node;
    }

    /// Sets the text of the last line.
    pub fn say(&mut self, message: String) {
        self.message = format::safe(&message);
    }

    /// Returns the containers that the filter selects, in sorted order.
    pub fn rows(&self) -> Vec<&schema::Container> {
        let wanted = self.filter.to_lowercase();
        let fits = |c: &&schema::Container| {
            format!("{} {} {}", c.name, c.state, c.reason_text).to_lowercase().contains(&wanted)
        };
        let mut rows: Vec<&schema::Container> = self.node.containers.iter().filter(fits).collect();
        rows.sort_by(|a, b| {
            let by = match self.sort {
                SortColumn::Name => std::cmp::Ordering::Equal,
                SortColumn::State => a.state.cmp(&b.state),
                SortColumn::Vram => b.vram_bytes.cmp(&a.vram_bytes),
                SortColumn::HostRam => b.offloaded_bytes.cmp(&a.offloaded_bytes),
                SortColumn::Idle => b.idle_ms.cmp(&a.idle_ms),
            };
            by.then_with(|| a.name.cmp(&b.name))
        });
        rows
    }

    /// Returns the position of the selected row.
    pub fn position(&self) -> usize {
        self.rows().iter().position(|c| c.key == self.chosen).unwrap_or(0)
    }

    /// Handles a key press, and returns what the caller must do.
    pub fn key(&mut self, key: KeyEvent) -> KeyOutcome {
        if key.kind != KeyEventKind::Press {
            return KeyOutcome::Stay;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return KeyOutcome::End;
        }
        if self.typing {
            match key.code {
                KeyCode::Enter => self.typing = false,
                KeyCode::Esc => {
                    self.typing = false;
                    self.filter.clear();
                }
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Char(c) => self.filter.push(c),
                _ => {}
            }
            return KeyOutcome::Stay;
        }
        match key.code {
            KeyCode::Char('q') => return KeyOutcome::End,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Char('o') => return self.act(|_| ContainerAction::Offload),
            KeyCode::Char('r') => return self.act(|_| ContainerAction::Restore),
            KeyCode::Char('p') => return self.act(|c| ContainerAction::Pin(!c.pinned)),
            _ => {}
        }
        KeyOutcome::Stay
    }

    fn step(&mut self, by: isize) {
        let next = self.position().saturating_add_signed(by);
        let rows = self.rows();
        if let Some(row) = rows.get(next.min(rows.len().saturating_sub(1))) {
            self.chosen = row.key.clone();
        }
    }

    fn act(&self, what: impl FnOnce(&schema::Container) -> ContainerAction) -> KeyOutcome {
        match self.rows().get(self.position()) {
            Some(c) => KeyOutcome::Act {
                container: format::safe(&c.name),
                key: c.key.clone(),
                what: what(c),
            },
            None => KeyOutcome::Stay,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(name: &str, vram_bytes: u64) -> schema::Container {
        schema::Container { name: name.into(), key: name.into(), vram_bytes, ..Default::default() }
    }

    fn state() -> TopState {
        let mut state = TopState::default();
        let containers = vec![container("b", 1), container("a", 2), container("c", 3)];
        state.show(schema::Node { containers, ..Default::default() });
        state
    }

    fn press(state: &mut TopState, keys: &str) -> KeyOutcome {
        keys.chars()
            .map(|c| state.key(KeyEvent::from(KeyCode::Char(c))))
            .last()
            .unwrap_or(KeyOutcome::Stay)
    }

    fn names(state: &TopState) -> Vec<&str> {
        state.rows().into_iter().map(|c| c.name.as_str()).collect()
    }

    #[test]
    fn the_selected_row_stays_selected() {
        let mut state = state();
        press(&mut state, "jj");
        assert_eq!((names(&state), state.chosen.as_str()), (vec!["a", "b", "c"], "c"));
        press(&mut state, "ss");
        assert_eq!((names(&state), state.position()), (vec!["c", "a", "b"], 0));
        press(&mut state, "kkk");
        assert_eq!(state.position(), 0);
    }

    #[test]
    fn keys_go_to_the_filter_while_it_is_typed() {
        let mut state = state();
        assert_eq!(press(&mut state, "/q"), KeyOutcome::Stay);
        assert!(names(&state).is_empty());
        state.key(KeyEvent::from(KeyCode::Esc));
        assert_eq!(names(&state).len(), 3);
        assert_eq!(press(&mut state, "q"), KeyOutcome::End);
    }

    #[test]
    fn the_chosen_container_is_moved_by_its_key() {
        let mut state = state();
        press(&mut state, "j");
        let step = press(&mut state, "o");
        let act = |what| KeyOutcome::Act { container: "b".into(), key: "b".into(), what };
        assert_eq!(step, act(ContainerAction::Offload));
        assert_eq!(press(&mut state, "p"), act(ContainerAction::Pin(true)));
        state.node.containers[0].pinned = true;
        assert_eq!(press(&mut state, "p"), act(ContainerAction::Pin(false)));
        assert_eq!(press(&mut TopState::default(), "o"), KeyOutcome::Stay);
    }
}
