//! The command line options of the daemon.

use std::path::PathBuf;
use std::time::Duration;

use affinode_sim_protocol::{GpuInfo, MAX_GPUS, SOCKET, STACK_LIMIT, THREADS, gpu_uuid};
use clap::Parser;

const MIB: u64 = 1 << 20;

/// Simulates the kernel driver of the simulated GPU.
#[derive(Debug, Clone, Parser)]
pub struct Config {
    /// Path of the socket. A socket that an ended daemon left there is replaced.
    #[arg(long, default_value = SOCKET)]
    pub socket: PathBuf,
    /// Number of simulated GPUs.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=MAX_GPUS as i64))]
    pub gpus: u16,
    /// Index of the GPU that reports MIG mode.
    #[arg(long)]
    pub mig_gpu: Option<u16>,
    /// Simulates a driver that enforces VRAM limits of cgroups, as driver 615 does.
    #[arg(long)]
    pub memory_limits: bool,
    /// Memory of each GPU in MiB.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub vram_mib: u64,
    /// Product name of the GPUs. It must say that they are simulated.
    #[arg(long, default_value = "NVIDIA Simulated H200", value_parser = simulated_name)]
    pub name: String,
    /// VRAM in MiB that a process's context takes on each GPU. About half of it is local memory
    /// (the stacks of the GPU's threads). The size of the local memory depends on the context's
    /// stack limit.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(0..=1 << 20))]
    pub context_mib: u64,
    /// Host memory in MiB that a checkpoint takes from the process, in addition to the contents of
    /// its VRAM.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(0..=1 << 20))]
    pub checkpoint_extra_mib: u64,
    /// Minimum duration of a checkpoint, in milliseconds.
    #[arg(long, default_value_t = 0)]
    pub checkpoint_fixed_ms: u64,
    /// Speed of a checkpoint in GiB per second; 0: as fast as this machine copies.
    #[arg(long, default_value_t = 0.0, value_parser = rate)]
    pub checkpoint_gib_per_s: f64,
    /// Minimum duration of a restore, in milliseconds.
    #[arg(long, default_value_t = 0)]
    pub restore_fixed_ms: u64,
    /// Speed of a restore in GiB per second; 0: as fast as this machine copies.
    #[arg(long, default_value_t = 0.0, value_parser = rate)]
    pub restore_gib_per_s: f64,
}

impl Config {
    /// Returns the data of the simulated GPUs of this node.
    pub fn gpu_infos(&self) -> Vec<GpuInfo> {
        let gpu = |index| GpuInfo {
            name: self.name.clone(),
            uuid: gpu_uuid(index),
            vram_bytes: self.vram_mib * MIB,
            mig: self.mig_gpu.map(usize::from) == Some(index),
            memory_limits: self.memory_limits,
            multiprocessors: self.multiprocessors(),
        };
        (0..usize::from(self.gpus)).map(gpu).collect()
    }

    /// Returns the number of multiprocessors of each GPU. It is chosen so that local memory takes
    /// about half of the VRAM of a new context.
    pub fn multiprocessors(&self) -> u32 {
        let bytes = STACK_LIMIT * u64::from(THREADS);
        u32::try_from(self.context_bytes() / 2 / bytes).unwrap_or(u32::MAX)
    }

    /// Returns the bytes of VRAM that a context takes.
    pub fn context_bytes(&self) -> u64 {
        self.context_mib * MIB
    }

    /// Returns the bytes of host memory that a checkpoint takes in addition to the contents of
    /// VRAM.
    pub fn checkpoint_extra_bytes(&self) -> u64 {
        self.checkpoint_extra_mib * MIB
    }

    /// Returns the minimum duration of a checkpoint of this many bytes.
    pub fn checkpoint_cost(&self, bytes: u64) -> Duration {
        cost(self.checkpoint_fixed_ms, self.checkpoint_gib_per_s, bytes)
    }

    /// Returns the minimum duration of a restore of this many bytes.
    pub fn restore_cost(&self, bytes: u64) -> Duration {
        cost(self.restore_fixed_ms, self.restore_gib_per_s, bytes)
    }
}

fn cost(fixed_ms: u64, gib_per_s: f64, bytes: u64) -> Duration {
    let fixed = Duration::from_millis(fixed_ms.min(600_000));
    if gib_per_s > 0.0 {
        let seconds = bytes as f64 / (1u64 << 30) as f64 / gib_per_s;
        fixed + Duration::from_secs_f64(seconds.min(600.0))
    } else {
        fixed
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err(String::from("expected a number of GiB per second, or 0 for no limit")),
    }
}

fn simulated_name(text: &str) -> Result<String, String> {
    if text.contains("Simulated") && text.len() <= 64 {
        Ok(text.to_owned())
    } else {
        Err(String::from("the name must contain the word Simulated and have at most 64 bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_a_fixed_part_and_one_by_size() {
        let options = ["sim", "--checkpoint-fixed-ms", "300", "--checkpoint-gib-per-s", "2"];
        let config = Config::parse_from(options);
        assert_eq!(config.checkpoint_cost(4 << 30), Duration::from_millis(2300));
        assert_eq!(config.restore_cost(4 << 30), Duration::ZERO);
    }

    #[test]
    fn a_name_that_hides_the_simulation_is_refused() {
        assert!(Config::try_parse_from(["sim", "--name", "NVIDIA H200"]).is_err());
        assert!(Config::try_parse_from(["sim", "--checkpoint-gib-per-s", "nan"]).is_err());
        assert!(Config::try_parse_from(["sim", "--gpus", "17"]).is_err());
    }
}
