use super::*;
use proptest::prelude::*;

#[test]
fn messages_come_back_as_sent() {
    for message in [
        AgentMessage::Hello {
            version: 1,
            pid_in_namespace: 7,
            phase: Phase::Checkpointed,
            generation: 3,
            driver_version: 13_000,
            hazards: Hazards(5),
            abilities: Capabilities::RECORDS_CALLS,
            swappable_bytes: 1 << 41,
            copied_out_bytes: 1 << 40,
            local_memory_bytes: 1 << 30,
        },
        AgentMessage::Wake { generation: 9, waiters: 2, hook: 4 },
        AgentMessage::Report {
            order: 1,
            outcome: Outcome::DriverError,
            phase: Phase::Locked,
            cuda_error: 304,
            elapsed_us: 12,
            swappable_bytes: 14,
            copied_out_bytes: 13,
            unchanged_bytes: 12,
            zero_bytes: 11,
            local_memory_bytes: 17,
        },
        AgentMessage::Notice { hazards: Hazards::MANAGED_MEMORY },
        AgentMessage::AllocWait { ticket: 3, bytes: 1 << 40, uuid: [7; 16], attempts: 2 },
        AgentMessage::AllocWaitDone { ticket: 3, served: true },
        AgentMessage::AskVram { ticket: 7, bytes: 1 << 40, uuid: [9; 16] },
        AgentMessage::VramTaken,
        AgentMessage::Releasing,
        AgentMessage::AskReadings,
    ] {
        assert_eq!(AgentMessage::decode(&message.encode()), Ok(message));
    }
    let actions = [
        Action::Close { deadline_ms: 50 },
        Action::Open,
        Action::Lock { timeout_ms: 100 },
        Action::Checkpoint { vram_bytes: u64::MAX },
        Action::Restore,
        Action::RestoreAsFreed,
        Action::Unlock,
        Action::HoldAllocations { deadline_ms: 1 },
        Action::ReleaseAllocations,
        Action::RestoreOnGpu { from: 7, to: 31 },
    ];
    let copies_out = (0..32_u8).map(|bits| {
        let [keep, then_checkpoint, check, host_pool, release_early] =
            [1, 2, 4, 8, 16].map(|bit| bits & bit != 0);
        let how = CopyOptions { keep, then_checkpoint, check, host_pool, release_early };
        Action::CopyOut { vram_bytes: 1, how }
    });
    let orders = actions.into_iter().chain(copies_out);
    let orders =
        orders.map(|action| ControllerMessage::Order { order: 8, action, decided_ms: 1 << 40 });
    for message in orders.chain([
        ControllerMessage::Welcome {
            process: 1,
            wait_for_room_ms: 60_000,
            engine: Engine::Full,
            vram_limit_bytes: 20 << 30,
        },
        ControllerMessage::VramAllowance {
            ticket: 7,
            uuid: [9; 16],
            bytes: 5,
            free_bytes: 6,
            epoch: 1 << 40,
        },
        ControllerMessage::Refuse { version: 1, retry: true },
        ControllerMessage::WakeAck { generation: 1, position: 2 },
        ControllerMessage::AllocGrant { ticket: 3, granted: true },
        ControllerMessage::SampleCalls { one_in: 64, read: 1 << 40 },
        ControllerMessage::Copier,
        ControllerMessage::HostPool,
        ControllerMessage::FreeHostMemory,
        ControllerMessage::StoreOnDisk,
        ControllerMessage::Prefault { on: true },
        ControllerMessage::PrefaultHostPool,
        ControllerMessage::Reading(GpuReading {
            uuid: [7; 16],
            total_bytes: 1 << 40,
            free_bytes: 1 << 39,
            reserved_bytes: 1 << 30,
            gpu_percent: 3,
            memory_percent: UNKNOWN_UTILIZATION,
            temperature_c: 41,
            power_mw: 70_000,
        }),
        ControllerMessage::Gpus {
            first: 5,
            total: 32,
            gpus: [1, 2, 3, 4, 5].map(|n| Gpu { uuid: [n; 16], minor: u32::from(n) << 20 }),
        },
    ]) {
        assert_eq!(ControllerMessage::decode(&message.encode()), Ok(message));
    }
}

proptest! {
    #[test]
    fn noise_is_decoded_without_panic(noise in proptest::collection::vec(any::<u8>(), FRAME_BYTES), kind in 0_u32..113) {
        let mut frame = [0; FRAME_BYTES];
        frame.copy_from_slice(&noise);
        frame[..4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
        frame[4..8].copy_from_slice(&kind.to_le_bytes());
        let _ = AgentMessage::decode(&frame);
        let _ = ControllerMessage::decode(&frame);
    }
}
