//! A CUDA program on the node that is driven through two pipes.

use affinode_e2e::{
    container::make_pipes,
    worker::{Answer, Lines},
};
use anyhow::{Context, Result, ensure};

use super::node::Node;

/// VRAM that each fills.
pub const MIB: u64 = 64;

/// One of them.
pub struct Program {
    /// What it is called, and where its pipes are.
    pub name: &'static str,
    lines: Lines,
}

impl Program {
    /// Makes its pipes; it is started by somebody else.
    pub fn prepare(node: &Node, name: &'static str) -> Result<Self> {
        let folder = make_pipes(&node.file("/srv"), name)?;
        Ok(Self { name, lines: Lines::open(&folder)? })
    }

    /// The command that runs it on its pipes, for a shell on the node.
    pub fn command(&self) -> String {
        let (name, seed) = (self.name, self.name.len() + self.name.as_bytes()[0] as usize);
        format!(
            "sh -c 'exec /opt/affinode/clients/dlopen_dlsym --mib {MIB} --seed {seed} \
             </srv/io/{name}/in >/srv/io/{name}/out'"
        )
    }

    /// Waits until it has filled its VRAM.
    pub fn wait_filled(&mut self) -> Result<()> {
        self.expect("open")?;
        self.expect("fill").map(drop)
    }

    /// Calls it, and demands that every word of its VRAM is as it was.
    pub fn verify(&mut self) -> Result<()> {
        self.call("verify")?;
        self.verified()
    }

    /// Calls it, and does not wait.
    pub fn call(&mut self, command: &str) -> Result<()> {
        self.lines.send(command)
    }

    /// Waits for the answer to `verify`.
    pub fn verified(&mut self) -> Result<()> {
        let answer = self.expect("verify")?;
        ensure!(answer.ok == Some(true), "{}: its memory is not as it was: {answer:?}", self.name);
        Ok(())
    }

    fn expect(&mut self, command: &str) -> Result<Answer> {
        let line = self.lines.receive().with_context(|| self.name.to_owned())?;
        let answer: Answer = serde_json::from_str(&line).with_context(|| line.clone())?;
        ensure!(answer.command == command && answer.result == 0, "{}: {line}", self.name);
        Ok(answer)
    }
}
