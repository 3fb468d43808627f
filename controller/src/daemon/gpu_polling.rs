//! Readings of the devices: one on its way, and one after it when something changed
//! meanwhile. However often a container makes something change, those who wait for a
//! survey wait for two readings at most.

/// What is on its way.
#[derive(Debug, Default)]
pub struct GpuPolling {
    asked: bool,
    again: bool,
}

impl GpuPolling {
    /// A reading is wanted. `true`: ask for it now.
    pub fn wanted(&mut self) -> bool {
        self.again = self.asked;
        !std::mem::replace(&mut self.asked, true)
    }

    /// A reading came. `true`: ask for the next now.
    pub fn came(&mut self) -> bool {
        self.asked = std::mem::take(&mut self.again);
        self.asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_wishes_are_one_reading_now_and_one_after_it() {
        let mut readings = GpuPolling::default();
        assert_eq!((0..1_000).filter(|_| readings.wanted()).count(), 1);
        assert!(readings.came(), "something changed meanwhile");
        assert!(!readings.came());
        assert!(readings.wanted());
        assert!(!readings.came(), "nothing changed meanwhile");
    }
}
