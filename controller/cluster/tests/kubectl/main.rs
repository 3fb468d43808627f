//! Tests the program `kubectl-affinode` with a simulated API server and simulated agents on
//! loopback. HTTP, port-forwards and TLS are real.

#![allow(clippy::unwrap_used)] // Helpers of tests.

mod agent;
mod api;
mod look;
mod moves;
mod nodes;
mod report;

use std::sync::Arc;

use affinode_controller::schema;
use serde_json::{Value, json};
use tokio::process::Command;

use self::{
    agent::{Agent, USER},
    api::ApiServer,
};

/// A simulated cluster, and the kubeconfig of its user.
struct Stage {
    api: ApiServer,
    folder: tempfile::TempDir,
}

/// Output and exit status of a command.
struct Printed {
    status: i32,
    out: String,
    err: String,
}

impl Printed {
    /// Returns the words of each line of the output.
    fn rows(&self) -> Vec<Vec<&str>> {
        self.out.lines().map(|line| line.split_whitespace().collect()).collect()
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self}"))
    }
}

impl std::fmt::Display for Printed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "exit {}\n{}\n{}", self.status, self.out, self.err)
    }
}

impl Stage {
    async fn new() -> Stage {
        let api = ApiServer::default();
        let address = api.serve().await;
        let stage = Stage { api, folder: tempfile::tempdir().unwrap() };
        let users = json!([
            { "name": "ana", "user": { "token": USER } },
            { "name": "other", "user": { "token": "of-another-user" } },
            { "name": "nameless", "user": {} },
            { "name": "disguised", "user": { "token": USER, "as": "root" } },
        ]);
        let context = |user: &str| {
            let context = json!({ "cluster": "c", "user": user, "namespace": "ml" });
            json!({ "name": user, "context": context })
        };
        let contexts = ["ana", "other", "nameless", "disguised"].map(context);
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "ana",
            "clusters": [{ "name": "c", "cluster": { "server": format!("http://{address}") } }],
            "users": users, "contexts": contexts,
        });
        std::fs::write(stage.folder.path().join("kubeconfig"), config.to_string()).unwrap();
        stage
    }

    /// Adds a node with an agent.
    async fn node(&self, name: &str, node: Option<schema::Node>) -> Arc<Agent> {
        let (agent, address, fingerprint) = Agent::start(node).await;
        self.api.add(name, Some(address), &fingerprint);
        agent
    }

    async fn run(&self, line: &str) -> Printed {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-affinode"));
        command.args(line.split_whitespace()).kill_on_drop(true);
        command.env_clear().env("KUBECONFIG", self.folder.path().join("kubeconfig"));
        let output = command.output().await.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Printed {
            status: output.status.code().unwrap(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }
}
