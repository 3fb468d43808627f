//! `affinode`: looks at a node's controller and tells it what to do.

fn main() -> std::process::ExitCode {
    affinode_controller::cli::main()
}
