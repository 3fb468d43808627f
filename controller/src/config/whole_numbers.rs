//! Reads whole numbers that a template wrote as floats. Helm reads every number of a values file as
//! a float, so a file may have `priority = 5.0`, which means 5.

use figment::{
    Error, Metadata, Profile, Provider,
    value::{Dict, Map, Num, Value},
};

/// Largest number up to which an f64 represents every whole number exactly.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// A source of the configuration that reads floats without a fraction as integers.
pub(super) struct WholeNumbers<P>(pub(super) P);

impl<P: Provider> Provider for WholeNumbers<P> {
    fn metadata(&self) -> Metadata {
        self.0.metadata()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, Error> {
        let mut data = self.0.data()?;
        data.values_mut().flat_map(Dict::values_mut).for_each(make_whole);
        Ok(data)
    }
}

/// Converts floats without a fraction to integers. Keys that expect a float are not harmed, because
/// they accept integers as well.
fn make_whole(value: &mut Value) {
    match value {
        Value::Num(_, number) => {
            if let Num::F64(float) = *number
                && float.fract() == 0.0
                && float.abs() <= EXACT
            {
                #[allow(clippy::cast_possible_truncation)] // Whole, and exact in both types.
                let whole = float as i64;
                *number = Num::I64(whole);
            }
        }
        Value::Dict(_, dict) => dict.values_mut().for_each(make_whole),
        Value::Array(_, values) => values.iter_mut().for_each(make_whole),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn whole_floats_are_integers() {
        let text = "[policy]\npriority = 5.0\nminimum_vram_mib = 1024.0\n[memory]\n\
                    node_reserve_mib = 2.0\n[[policy.namespace]]\nname = \"ml\"\npriority = -3.0\n\
                    minimum_vram_mib = 1048576.0\n[report]\nprice_per_gpu_hour = 2.0\n";
        let config = Config::from_toml(text).unwrap();
        let policy = config.policy.policy();
        assert_eq!((policy.priority, policy.minimum_vram_bytes), (5, 1 << 30));
        assert_eq!(config.memory.node_reserve_mib, Some(2));
        let ruled = config.settings().policies.before_annotations("ml");
        assert_eq!((ruled.priority, ruled.minimum_vram_bytes), (-3, 1 << 40));
    }

    #[test]
    fn a_fraction_is_refused_where_none_fits() {
        for number in ["5.5", "1e300", "nan", "inf"] {
            let text = format!("[policy]\npriority = {number}\n");
            let error = Config::from_toml(&text).unwrap_err().to_string();
            assert!(error.contains("policy.priority"), "{error}");
        }
    }
}
