//! `affinode completion` and `affinode man`: print a shell's completion script, and write manual
//! pages.

use std::{io::Write, path::Path};

use clap::CommandFactory;
use clap_complete::Shell;

use super::{Args, CliError};

/// The shells that completion supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CompletionShell {
    Bash,
    Zsh,
    Fish,
}

/// Prints the completion script of a shell.
pub fn completion(out: &mut dyn Write, shell: CompletionShell) -> Result<(), CliError> {
    let shell = match shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Zsh => Shell::Zsh,
        CompletionShell::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "affinode", &mut script);
    Ok(out.write_all(&script)?)
}

/// Writes a manual page for the command and each of its subcommands into a folder.
pub fn man(folder: &Path) -> Result<(), CliError> {
    std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Args::command(), folder))
        .map_err(|source| CliError::Manual { folder: folder.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_completes_the_commands() {
        for shell in [CompletionShell::Bash, CompletionShell::Zsh, CompletionShell::Fish] {
            let mut script = Vec::new();
            completion(&mut script, shell).unwrap();
            let script = String::from_utf8(script).unwrap();
            assert!(
                ["offload", "report", "top"].iter().all(|word| script.contains(word)),
                "{shell:?}"
            );
        }
    }

    #[test]
    fn every_command_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        man(folder.path()).unwrap();
        for page in ["affinode.1", "affinode-ps.1", "affinode-report.1"] {
            assert!(folder.path().join(page).exists(), "{page}");
        }
    }
}
