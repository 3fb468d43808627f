//! The demo that goes on: containers that work, rest and make room for each other,
//! for as long as somebody looks.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use affinode_e2e::{
    gpu::Gpu,
    testbed::{MIB, Testbed},
    worker::Worker,
};
use anyhow::Result;

/// VRAM of each container on the machine's own GPU.
const REAL_MIB: u64 = 1024;
/// Between two calls of a round.
const BEAT: std::time::Duration = std::time::Duration::from_secs(4);

/// A port that nobody listens on now.
pub fn free_address() -> Result<SocketAddr> {
    let usual = SocketAddr::from((Ipv4Addr::LOCALHOST, 9410));
    let socket = TcpListener::bind(usual)
        .or_else(|_| TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))))?;
    Ok(socket.local_addr()?)
}

/// The scene's configuration, with the page at an address.
pub fn config(scene: &str, address: Option<SocketAddr>) -> String {
    let http = address.map_or_else(String::new, |address| {
        format!("[http]\nlisten = \"{address}\"\n[report]\nprice_per_gpu_hour = 2.5\n")
    });
    format!("{scene}{http}")
}

/// Plays until the process is ended.
pub fn live(world: &Testbed) -> Result<()> {
    let mib = match world.gpu() {
        Gpu::Simulated { vram_bytes } => vram_bytes / MIB / 10 * 3,
        Gpu::Real => REAL_MIB,
    };
    // Together more than a simulated GPU holds: the next comes when there is room.
    let names = ["notebook", "server", "trainer", "agent"];
    let mut workers = Vec::new();
    for name in names {
        workers.push(Worker::start(world, name, mib)?);
        world.cli().wait_for_state(name, "Offloaded")?;
    }
    for round in 0.. {
        // Each works at a beat of its own.
        for (number, worker) in workers.iter_mut().enumerate() {
            if round % (number + 1) == 0 {
                worker.verify()?;
            }
        }
        std::thread::sleep(BEAT);
    }
    Ok(())
}
