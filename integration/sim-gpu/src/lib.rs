//! The simulated GPU. Its tests are in `tests/`, its parts in the packages beside this one.
