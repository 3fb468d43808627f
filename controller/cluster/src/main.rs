//! `affinode-cluster`: parses, runs, exits.

fn main() -> std::process::ExitCode {
    affinode_cluster::main()
}
