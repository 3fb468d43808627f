//! Computes figures (median and noise) from samples.

/// Returns the median of the samples, or 0 if there are none.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// Returns the noise of samples: the difference between the median of every second sample and the
/// median of the other samples. The samples are in the order of time, so the conditions were the
/// same for both halves.
pub fn noise(samples: &[f64]) -> f64 {
    let half = |first: usize| samples.iter().copied().skip(first).step_by(2).collect::<Vec<_>>();
    (median(&half(0)) - median(&half(1))).abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_found_whatever_the_order() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn noise_is_between_halves_in_turn() {
        assert_eq!(noise(&[5.0, 5.0, 5.0, 5.0]), 0.0);
        assert_eq!(noise(&[1.0, 4.0, 1.0, 4.0]), 3.0);
    }
}
