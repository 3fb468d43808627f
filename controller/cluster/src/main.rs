//! The program `affinode-cluster`.

fn main() -> std::process::ExitCode {
    affinode_cluster::main()
}
