//! The continuous demo with the dashboard: containers work, become idle and evict each other, until
//! the user ends it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use affinode_e2e::{
    gpu::Gpu,
    testbed::{MIB, Testbed},
    worker::Worker,
};
use anyhow::Result;

/// VRAM in MiB of each container, if the demo runs on the machine's own GPU.
const REAL_MIB: u64 = 1024;
/// Pause between two rounds of calls.
const BEAT: std::time::Duration = std::time::Duration::from_secs(4);

/// Finds a free port for the dashboard, preferably the usual port.
pub fn free_address() -> Result<SocketAddr> {
    let usual = SocketAddr::from((Ipv4Addr::LOCALHOST, 9410));
    let socket = TcpListener::bind(usual)
        .or_else(|_| TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))))?;
    Ok(socket.local_addr()?)
}

/// Returns the configuration of a scenario. Adds the address of the dashboard if there is one.
pub fn config(scene: &str, address: Option<SocketAddr>) -> String {
    let http = address.map_or_else(String::new, |address| {
        // Any user of this machine may offload and restore the demo's containers.
        let http = format!("[http]\nlisten = \"{address}\"\nactions = \"any-client\"\n");
        format!("{http}[report]\nprice_per_gpu_hour = 2.5\n")
    });
    format!("{scene}{http}")
}

/// Runs the continuous demo until the user ends this process.
pub fn live(world: &Testbed) -> Result<()> {
    let mib = match world.gpu() {
        Gpu::Simulated { vram_bytes } => vram_bytes / MIB / 10 * 3,
        Gpu::Real => REAL_MIB,
    };
    // Together the containers need more VRAM than a simulated GPU has. Each start waits until VRAM
    // is free.
    let names = ["notebook", "server", "trainer", "agent"];
    let mut workers = Vec::new();
    for name in names {
        workers.push(Worker::start(world, name, mib)?);
        world.cli().wait_for_state(name, "Offloaded")?;
    }
    for round in 0.. {
        // The first container makes a call in each round, the second in every second round, and so
        // on.
        for (number, worker) in workers.iter_mut().enumerate() {
            if round % (number + 1) == 0 {
                worker.verify()?;
            }
        }
        std::thread::sleep(BEAT);
    }
    Ok(())
}
