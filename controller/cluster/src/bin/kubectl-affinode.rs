//! The program `kubectl-affinode`, which kubectl runs as the plugin `kubectl affinode`.

fn main() -> std::process::ExitCode {
    affinode_cluster::kubectl::main()
}
