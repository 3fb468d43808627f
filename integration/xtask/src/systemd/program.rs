//! A CUDA program on the node, which the test controls through two pipes.

use affinode_e2e::{
    container::make_pipes,
    worker::{Answer, Lines},
};
use anyhow::{Context, Result, ensure};

use super::node::Node;

/// VRAM in MiB that each program fills.
pub const MIB: u64 = 64;

pub struct Program {
    /// Name of the program, and of the folder with its pipes.
    pub name: &'static str,
    lines: Lines,
}

impl Program {
    /// Creates the program's pipes. A step starts the program later.
    pub fn prepare(node: &Node, name: &'static str) -> Result<Self> {
        let folder = make_pipes(&node.file("/srv"), name)?;
        Ok(Self { name, lines: Lines::open(&folder)? })
    }

    /// Shell command that runs the program on the node, connected to its pipes.
    pub fn command(&self) -> String {
        let (name, seed) = (self.name, self.name.len() + self.name.as_bytes()[0] as usize);
        format!(
            "sh -c 'exec /opt/affinode/clients/dlopen_dlsym --mib {MIB} --seed {seed} \
             </srv/io/{name}/in >/srv/io/{name}/out'"
        )
    }

    /// Waits until the program has filled its VRAM.
    pub fn wait_filled(&mut self) -> Result<()> {
        self.expect("open")?;
        self.expect("fill").map(drop)
    }

    /// Makes the program check its VRAM. Every word must be unchanged.
    pub fn verify(&mut self) -> Result<()> {
        self.call("verify")?;
        self.verified()
    }

    /// Sends a command to the program without waiting for the reply.
    pub fn call(&mut self, command: &str) -> Result<()> {
        self.lines.send(command)
    }

    /// Waits for the program's reply to the command `verify`, which must report success.
    pub fn verified(&mut self) -> Result<()> {
        let answer = self.expect("verify")?;
        ensure!(answer.ok == Some(true), "{}: the memory has changed: {answer:?}", self.name);
        Ok(())
    }

    fn expect(&mut self, command: &str) -> Result<Answer> {
        let line = self.lines.receive().with_context(|| self.name.to_owned())?;
        let answer: Answer = serde_json::from_str(&line).with_context(|| line.clone())?;
        ensure!(
            answer.command == command && answer.result == 0,
            "{}: expected success of {command}, got {line}",
            self.name
        );
        Ok(answer)
    }
}
