//! What the screen shows and what keys do to it. Without I/O.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::{cli::format, schema};

/// What follows from a key.
#[derive(Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// Nothing but a new picture.
    Stay,
    /// The end.
    End,
    /// Something is wanted of a container.
    Act {
        /// Its name.
        container: String,
        /// Its key.
        key: String,
        /// What.
        what: ContainerAction,
    },
}

/// What may be wanted of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerAction {
    /// To leave the GPU.
    Offload,
    /// To come back.
    Restore,
    /// To stay there, or to be free again.
    Pin(bool),
}

/// What rows are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SortColumn {
    /// Name.
    #[default]
    Name,
    /// State.
    State,
    /// VRAM held, most first.
    Vram,
    /// VRAM in host memory, most first.
    Away,
    /// Longest without a call first.
    Idle,
}

impl SortColumn {
    /// Its title.
    pub fn word(self) -> &'static str {
        match self {
            SortColumn::Name => "name",
            SortColumn::State => "state",
            SortColumn::Vram => "VRAM",
            SortColumn::Away => "host RAM",
            SortColumn::Idle => "idle",
        }
    }

    fn next(self) -> SortColumn {
        match self {
            SortColumn::Name => SortColumn::State,
            SortColumn::State => SortColumn::Vram,
            SortColumn::Vram => SortColumn::Away,
            SortColumn::Away => SortColumn::Idle,
            SortColumn::Idle => SortColumn::Name,
        }
    }
}

/// The screen.
#[derive(Debug, Default)]
pub struct TopState {
    /// The node as it was last seen.
    pub node: schema::Node,
    /// What rows are sorted by.
    pub sort: SortColumn,
    /// What names, states or reasons must contain.
    pub filter: String,
    /// Whether keys go to the filter.
    pub typing: bool,
    /// The last word of the controller.
    pub message: String,
    /// Key of the chosen container: it stays chosen when rows move.
    pub chosen: String,
}

impl TopState {
    /// A new look at the node.
    pub fn show(&mut self, node: schema::Node) {
        self.node = node;
    }

    /// A word for the last line.
    pub fn say(&mut self, message: String) {
        self.message = format::safe(&message);
    }

    /// The rows, filtered and sorted.
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
                SortColumn::Away => b.offloaded_bytes.cmp(&a.offloaded_bytes),
                SortColumn::Idle => b.idle_ms.cmp(&a.idle_ms),
            };
            by.then_with(|| a.name.cmp(&b.name))
        });
        rows
    }

    /// Position of the chosen row.
    pub fn position(&self) -> usize {
        self.rows().iter().position(|c| c.key == self.chosen).unwrap_or(0)
    }

    /// A key was pressed.
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
    fn rows_are_sorted_and_the_chosen_one_stays_chosen() {
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
