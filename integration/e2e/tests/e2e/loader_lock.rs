//! Test of a possible deadlock at the dynamic loader's lock. A thread holds this lock while its
//! CUDA call waits for the agent (Affinode's thread in the process). The agent needs the same lock
//! when it loads a module for the first time.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::Duration,
};

use affinode_e2e::{
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::Answer,
};
use affinode_proto::wire::{
    Engine, Phase,
    message::{Action, AgentMessage, ControllerMessage, CopyOptions, FRAME_BYTES, Outcome},
};
use anyhow::{Context, Result, ensure};

/// Time limit until the agent reports that a copy waits for the lock. The agent usually reports
/// this far earlier.
const REPORT_TIMEOUT: Duration = Duration::from_secs(30);
const VRAM_BYTES: u64 = 8 << 20;
const CLOSE: Action = Action::Close { deadline_ms: 5_000 };
const LOCK: Action = Action::Lock { timeout_ms: 5_000 };
const COPY_OUT: Action = Action::CopyOut {
    vram_bytes: VRAM_BYTES,
    how: CopyOptions {
        keep: false,
        then_checkpoint: false,
        check: true,
        host_pool: false,
        release_early: false,
    },
};

/// A program that runs on the host, and its connection to the test. The test acts as a controller,
/// and sends orders to the program over this connection.
struct OrderedProgram {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    agent: UnixStream,
    last_order: u64,
}

impl OrderedProgram {
    fn start(world: &Testbed) -> Result<OrderedProgram> {
        let socket = world.dir().join("ordered.sock");
        let listener = UnixListener::bind(&socket)?;
        let program = world.artifacts().clients_dir().join("constructor");
        let library = world.artifacts().lib_dir().join("libaffinode_preload.so");
        ensure!(File::open(&library).is_ok(), "no {}", library.display());
        let mut child = world
            .host_gpu_command(&program)
            .env("LD_PRELOAD", library)
            .env("AFFINODE_SOCKET", &socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let commands = child.stdin.take().context("the process has no input pipe")?;
        let answers =
            BufReader::new(child.stdout.take().context("the process has no output pipe")?);
        let (agent, _) = listener.accept()?;
        agent.set_read_timeout(Some(REPORT_TIMEOUT))?;
        let mut program = OrderedProgram { child, commands, answers, agent, last_order: 0 };
        let hello = program.receive()?;
        ensure!(matches!(hello, AgentMessage::Hello { .. }), "expected a Hello, got {hello:?}");
        let engine = Engine::Copy;
        program.send(&ControllerMessage::Welcome {
            process: 1,
            wait_for_room_ms: 0,
            engine,
            vram_limit_bytes: 0,
        })?;
        Ok(program)
    }

    fn send(&mut self, message: &ControllerMessage) -> Result<()> {
        Ok(self.agent.write_all(&message.encode())?)
    }

    fn receive(&mut self) -> Result<AgentMessage> {
        let mut frame = [0; FRAME_BYTES];
        self.agent.read_exact(&mut frame).context("the agent sends no message")?;
        Ok(AgentMessage::decode(&frame)?)
    }

    fn order(&mut self, action: Action) -> Result<(Outcome, Phase)> {
        self.last_order += 1;
        let order = self.last_order;
        self.send(&ControllerMessage::Order { order, action, decided_ms: 0 })?;
        loop {
            if let AgentMessage::Report { order: of, outcome, phase, .. } = self.receive()? {
                ensure!(of == order);
                return Ok((outcome, phase));
            }
        }
    }

    fn done(&mut self, actions: &[Action]) -> Result<()> {
        for action in actions {
            let (outcome, phase) = self.order(*action)?;
            ensure!(outcome == Outcome::Done, "{action:?}: {outcome:?}, {phase:?}");
        }
        Ok(())
    }

    fn ask(&mut self, command: &str) -> Result<()> {
        Ok(writeln!(self.commands, "{command}")?)
    }

    fn answer(&mut self, to: &str) -> Result<Answer> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let answer: Answer = serde_json::from_str(&line).with_context(|| line.clone())?;
        ensure!(answer.command == to && answer.result == 0, "expected success of {to}, got {line}");
        Ok(answer)
    }
}

impl Drop for OrderedProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn constructor_at_the_gate_is_no_deadlock() -> Result<()> {
    let world = TestbedConfig::default().world()?;
    let mut program = OrderedProgram::start(&world)?;
    program.answer("ready")?;
    program.done(&[CLOSE, LOCK])?;
    program.ask("load")?;
    // The loop ends when the CUDA call in the constructor waits.
    while !matches!(program.receive()?, AgentMessage::Wake { .. }) {}
    assert_eq!(program.order(COPY_OUT)?, (Outcome::Busy, Phase::Closed));
    program.done(&[Action::Open])?;
    assert_eq!(program.answer("load")?.ok, Some(true));
    // When no thread holds the lock, the process is offloaded, and restored with its contents
    // unchanged.
    until("the agent to release the lock", || {
        program.done(&[CLOSE])?;
        let is_locked = program.order(LOCK)?.0 == Outcome::Done;
        if !is_locked {
            program.done(&[Action::Open])?;
        }
        Ok(is_locked.then_some(()))
    })?;
    program.done(&[COPY_OUT, Action::Restore, Action::Open])?;
    program.ask("verify")?;
    assert_eq!(program.answer("verify")?.ok, Some(true));
    Ok(())
}
