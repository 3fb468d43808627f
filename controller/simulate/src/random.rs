//! A source of random numbers that are the same for the same seed on every machine. It contains the
//! generator SplitMix64 and the distributions that traces need.

/// A random number generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct RandomSource(u64);

impl RandomSource {
    /// Creates a generator with this seed.
    #[must_use]
    pub fn new(seed: u64) -> RandomSource {
        RandomSource(seed)
    }

    /// Returns the next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a random number between 0 and 1, excluding both.
    pub fn unit(&mut self) -> f64 {
        ((self.bits() >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }

    /// Returns a random number between `low` and `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Returns an exponentially distributed random number with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Returns a random number with the standard normal distribution.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Returns a gamma-distributed random number (method of Marsaglia and Tsang).
    pub fn gamma(&mut self, shape: f64, scale: f64) -> f64 {
        if shape < 1.0 {
            let boost = self.unit().powf(1.0 / shape);
            return self.gamma(shape + 1.0, scale) * boost;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v <= 0.0 {
                continue;
            }
            let u = self.unit();
            // Most variates pass this cheaper test, which needs no logarithm. A variate that passes
            // it would also pass the exact test below.
            let surely = u < 1.0 - 0.0331 * x.powi(4);
            if surely || u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v * scale;
            }
        }
    }

    /// Returns a Weibull-distributed random number with these parameters.
    pub fn weibull(&mut self, shape: f64, scale: f64) -> f64 {
        scale * (-self.unit().ln()).powf(1.0 / shape)
    }
}
