//! `kubectl affinode`: parses, runs, exits.

fn main() -> std::process::ExitCode {
    affinode_cluster::kubectl::main()
}
