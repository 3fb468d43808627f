//! What the screen shows and what keys do to it. Without I/O.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::{cli::format, schema};

/// What follows from a key.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
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
        what: What,
    },
}

/// What may be wanted of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// To leave the GPU.
    Offload,
    /// To come back.
    Restore,
    /// To stay there, or to be free again.
    Pin(bool),
}

/// What rows are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
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

impl Sort {
    /// Its title.
    pub fn word(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::State => "state",
            Sort::Vram => "VRAM",
            Sort::Away => "host RAM",
            Sort::Idle => "idle",
        }
    }

    fn next(self) -> Sort {
        match self {
            Sort::Name => Sort::State,
            Sort::State => Sort::Vram,
            Sort::Vram => Sort::Away,
            Sort::Away => Sort::Idle,
            Sort::Idle => Sort::Name,
        }
    }
}

/// The screen.
#[derive(Debug, Default)]
pub struct State {
    /// The node as it was last seen.
    pub node: schema::Node,
    /// What rows are sorted by.
    pub sort: Sort,
    /// What names, states or reasons must contain.
    pub filter: String,
    /// Whether keys go to the filter.
    pub typing: bool,
    /// The last word of the controller.
    pub message: String,
    /// Key of the chosen container: it stays chosen when rows move.
    pub chosen: String,
}

impl State {
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
                Sort::Name => std::cmp::Ordering::Equal,
                Sort::State => a.state.cmp(&b.state),
                Sort::Vram => b.vram_bytes.cmp(&a.vram_bytes),
                Sort::Away => b.away_bytes.cmp(&a.away_bytes),
                Sort::Idle => b.idle_ms.cmp(&a.idle_ms),
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
    pub fn key(&mut self, key: KeyEvent) -> Step {
        if key.kind != KeyEventKind::Press {
            return Step::Stay;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return Step::End;
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
            return Step::Stay;
        }
        match key.code {
            KeyCode::Char('q') => return Step::End,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Char('o') => return self.act(|_| What::Offload),
            KeyCode::Char('r') => return self.act(|_| What::Restore),
            KeyCode::Char('p') => return self.act(|c| What::Pin(!c.pinned)),
            _ => {}
        }
        Step::Stay
    }

    fn step(&mut self, by: isize) {
        let next = self.position().saturating_add_signed(by);
        let rows = self.rows();
        if let Some(row) = rows.get(next.min(rows.len().saturating_sub(1))) {
            self.chosen = row.key.clone();
        }
    }

    fn act(&self, what: impl FnOnce(&schema::Container) -> What) -> Step {
        match self.rows().get(self.position()) {
            Some(c) => {
                Step::Act { container: format::safe(&c.name), key: c.key.clone(), what: what(c) }
            }
            None => Step::Stay,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(name: &str, vram_bytes: u64) -> schema::Container {
        schema::Container { name: name.into(), key: name.into(), vram_bytes, ..Default::default() }
    }

    fn state() -> State {
        let mut state = State::default();
        let containers = vec![container("b", 1), container("a", 2), container("c", 3)];
        state.show(schema::Node { containers, ..Default::default() });
        state
    }

    fn press(state: &mut State, keys: &str) -> Step {
        keys.chars()
            .map(|c| state.key(KeyEvent::from(KeyCode::Char(c))))
            .last()
            .unwrap_or(Step::Stay)
    }

    fn names(state: &State) -> Vec<&str> {
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
        assert_eq!(press(&mut state, "/q"), Step::Stay);
        assert!(names(&state).is_empty());
        state.key(KeyEvent::from(KeyCode::Esc));
        assert_eq!(names(&state).len(), 3);
        assert_eq!(press(&mut state, "q"), Step::End);
    }

    #[test]
    fn the_chosen_container_is_moved_by_its_key() {
        let mut state = state();
        press(&mut state, "j");
        let step = press(&mut state, "o");
        let act = |what| Step::Act { container: "b".into(), key: "b".into(), what };
        assert_eq!(step, act(What::Offload));
        assert_eq!(press(&mut state, "p"), act(What::Pin(true)));
        state.node.containers[0].pinned = true;
        assert_eq!(press(&mut state, "p"), act(What::Pin(false)));
        assert_eq!(press(&mut State::default(), "o"), Step::Stay);
    }
}
