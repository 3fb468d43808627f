//! `affinode`: shows the state of a node's controller and sends it requests.

fn main() -> std::process::ExitCode {
    affinode_cli::main()
}
