//! Runs commands that the documents show, one line after the other, in a testbed. As in a shell, the
//! working directory stays the same from one line to the next.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    thread,
};

use affinode_e2e::{
    artifacts::workspace_dir, containerd, testbed::Testbed, wait::WAIT_TIMEOUT, worker::Answer,
};
use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::document::DocLine;

/// A text in the documents' commands, and the text that the shell runs in its place.
#[derive(Clone, Debug, Serialize)]
pub struct Substitution {
    pub from: String,
    pub to: String,
    /// Reason why the original text cannot be run in a testbed.
    pub why: &'static str,
}

pub struct Shell<'a> {
    world: &'a Testbed,
    folder: PathBuf,
    path: String,
    /// Additional environment variables, each as NAME=VALUE.
    variables: Vec<String>,
    substitutions: Vec<Substitution>,
}

impl<'a> Shell<'a> {
    /// Creates a shell in a new folder of the testbed. The shell searches programs in this order:
    /// in a folder with a script named `cargo`, in the folder of an installation, in `tools`, and
    /// in the inherited `PATH`. The script makes `cargo xtask` run this program with the files of
    /// this build.
    pub fn new(world: &'a Testbed, tools: &[&Path]) -> Result<Self> {
        let folder = world.dir().join("user");
        let own = world.dir().join("user-tools");
        fs::create_dir_all(&folder)?;
        fs::create_dir_all(&own)?;
        let xtask = std::env::current_exe().context("cannot find the path of this program")?;
        script(
            &own.join("cargo"),
            &format!(
                "[ \"$1\" = xtask ] || exit 64\nshift\nAFFINODE_ARTIFACTS={} exec {} \"$@\"\n",
                world.artifacts().root().display(),
                xtask.display()
            ),
        )?;
        let inherited = std::env::var("PATH").unwrap_or_default();
        let tools: String = tools.iter().map(|tool| format!("{}:", tool.display())).collect();
        let path = format!("{}:/usr/local/bin:{tools}{inherited}", own.display());
        let (variables, substitutions) = (Vec::new(), Vec::new());
        let mut shell = Self { world, folder, path, variables, substitutions };
        let checkout = workspace_dir().display().to_string();
        shell.substitute("<this repository>", &checkout, "it is cloned from this checkout");
        Ok(shell)
    }

    /// Makes the shell run the text `to` wherever a document has the text `from`.
    pub fn substitute(&mut self, from: &str, to: &str, why: &'static str) {
        self.substitutions.push(Substitution { from: from.into(), to: to.into(), why });
    }

    /// Sets an environment variable for all command lines.
    pub fn set(&mut self, name: &str, value: &Path) {
        self.variables.push(format!("{name}={}", value.display()));
    }

    /// The substitutions of this shell.
    pub fn substitutions(&self) -> &[Substitution] {
        &self.substitutions
    }

    fn text(&self, line: &DocLine) -> String {
        let replace = |text: String, known: &Substitution| text.replace(&known.from, &known.to);
        self.substitutions.iter().fold(line.text.clone(), replace)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = self.world.keeper().command(Path::new("env"));
        command.arg("-C").arg(&self.folder).arg(format!("PATH={}", self.path));
        command.args(&self.variables).arg(program);
        command
    }

    /// Runs a command line, requires success, and returns its output.
    pub fn run(&mut self, line: &DocLine) -> Result<String> {
        let place = self.world.dir().join("user-folder");
        let script = format!("{}\npwd > {}", self.text(line), place.display());
        let mut command = self.command("sh");
        let said = containerd::run(command.args(["-e", "-c", &script]))
            .with_context(|| format!("{}:{}: {}", line.document, line.line, line.text))?;
        self.folder = fs::read_to_string(place)?.trim().into();
        Ok(said)
    }

    /// Starts a command line on a terminal.
    pub fn start(&self, line: &DocLine) -> Result<Terminal> {
        let mut command = self.command("script");
        command.args(["--quiet", "--flush", "--return", "--command", &self.text(line)]);
        command.arg("/dev/null").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot run `script`, of the package bsdutils")?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (keys, screen) = pipes.context("the terminal has no pipes")?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let read = BufReader::new(screen).lines().map_while(Result::ok);
            // After the terminal's end no line is wanted.
            read.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
        });
        Ok(Terminal { child, keys, lines, seen: String::new() })
    }
}

/// Writes a script and makes it executable.
pub fn script(path: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, format!("#!/bin/sh\n{text}"))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

/// A terminal on which a CUDA program runs. When this value is dropped, the program that provides
/// the terminal is ended.
pub struct Terminal {
    child: Child,
    keys: ChildStdin,
    lines: mpsc::Receiver<String>,
    seen: String,
}

impl Terminal {
    /// Types a line and presses Enter.
    pub fn enter(&mut self, text: &str) -> Result<()> {
        Ok(writeln!(self.keys, "{text}")?)
    }

    /// Waits for the CUDA program's reply to a command. The reply must report success.
    pub fn expect(&mut self, command: &str) -> Result<Answer> {
        loop {
            let line = self.lines.recv_timeout(WAIT_TIMEOUT).with_context(|| {
                format!("no reply to {command}; the terminal shows: {}", self.seen)
            })?;
            self.seen.push_str(&line);
            self.seen.push('\n');
            // The terminal shows what was typed, too.
            let Ok(answer) = serde_json::from_str::<Answer>(line.trim()) else { continue };
            ensure!(answer.command == command && answer.result == 0, "{answer:?}");
            return Ok(answer);
        }
    }

    /// Waits until the CUDA program has ended. It must have succeeded.
    pub fn end(mut self) -> Result<()> {
        // Its lines end when the program that shows it ends.
        while self.lines.recv_timeout(WAIT_TIMEOUT).context("the program does not end").is_ok() {}
        let status = self.child.wait()?;
        ensure!(status.success(), "the program ended with {status}: {}", self.seen);
        Ok(())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // An error here means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
