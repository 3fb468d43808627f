//! The page of all nodes, as a browser asks for it.

use std::time::Duration;

use affinode_e2e::{containerd, until::until_within};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{NAMESPACE, NODE, fetch, step};
use crate::{k8s::plane::Plane, say};

/// Whose token may look, sees all nodes and follows to each; others see nothing.
pub fn shows_nodes(plane: &Plane<'_>) -> Result<()> {
    step("The page of all nodes");
    let kubectl = |words: &[&str]| containerd::run(plane.kubectl().args(words));
    let ready = ["rollout", "status", "deployment/affinode-fleet", "--timeout=180s"];
    kubectl(&[&["-n", NAMESPACE], &ready[..]].concat())?;
    let pods = plane.get(&["pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=fleet"])?;
    let address = pods["items"][0]["status"]["podIP"].as_str().context("the page's address")?;
    let url = |path: &str| format!("https://{address}:8443{path}");
    let (list, node) = (url("/api/v1/fleet"), url(&format!("/nodes/{NODE}/api/v1/node")));
    let (page, text) = fetch(plane, &url("/"), None)?;
    ensure!(page == 200 && text.contains("all nodes"), "{page} {text}");
    kubectl(&["create", "serviceaccount", "looker"])?;
    let token = kubectl(&["create", "token", "looker"])?;
    for url in [&list, &node] {
        let (none, _) = fetch(plane, url, None)?;
        let (stranger, _) = fetch(plane, url, Some(&token))?;
        ensure!((none, stranger) == (401, 403), "{url}: {none}, of a stranger {stranger}");
    }
    kubectl(&[
        "create",
        "clusterrolebinding",
        "looker",
        "--clusterrole=affinode-viewer",
        "--serviceaccount=default:looker",
    ])?;
    // A no is remembered for ten seconds; then the node is asked.
    let mut last = String::new();
    let row = until_within(Duration::from_secs(60), "the node to be seen", || {
        let (code, text) = fetch(plane, &list, Some(&token))?;
        let list: Value = serde_json::from_str(&text).unwrap_or_default();
        let row = list["nodes"][0].clone();
        last = text;
        Ok((code == 200 && row["health"] == "Serving").then_some(row))
    });
    let row = row.with_context(|| format!("{last}\n{}", log(plane)))?;
    ensure!(row["name"] == NODE && row["figures"]["gpus"] == 1, "{row}");
    let known = |what: &str| row["figures"][what].as_u64().unwrap_or_default();
    ensure!(row["figures"]["simulated"] == true, "{row}");
    ensure!(known("resident") + known("offloaded") == 1, "{row}");
    say::note("without a token: 401; of an account that may not: 403; that may:");
    say::note(&row.to_string());
    let own = until_within(Duration::from_secs(60), "the node's own API", || {
        let (code, text) = fetch(plane, &node, Some(&token))?;
        Ok((code == 200).then_some(text))
    })?;
    ensure!(own.contains("\"pod\":\"trainer\""), "{own}");
    let events = url(&format!("/nodes/{NODE}/api/v1/events?watch=node"));
    let mut stream = plane.world().keeper().command("curl".as_ref());
    stream.args(["--silent", "--insecure", "--no-buffer", "--max-time", "5", "--header"]);
    // It has no end: curl ends it.
    let said =
        stream.arg(format!("Authorization: Bearer {}", token.trim())).arg(events).output()?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    ensure!(said.contains("event: node") && said.contains("\"pod\":\"trainer\""), "{said}");
    let offload = url(&format!("/nodes/{NODE}/api/v1/auto-offload/off"));
    let mut post = plane.world().keeper().command("curl".as_ref());
    post.args(["--silent", "--insecure", "--request", "POST", "--write-out", "\n%{http_code}"]);
    post.arg("--header").arg(format!("Authorization: Bearer {}", token.trim())).arg(offload);
    let said = containerd::run(&mut post)?;
    ensure!(said.ends_with("403") && said.contains("may not post"), "who may look moved: {said}");
    say::note("by its name the node's own API, for the same token: to look at, not to move");
    let (page, text) = fetch(plane, &url(&format!("/nodes/{NODE}/")), None)?;
    ensure!(page == 200 && text.contains("app.js"), "{page} {text}");
    kubectl(&["delete", "clusterrolebinding", "looker"])?;
    kubectl(&["delete", "serviceaccount", "looker"])?;
    Ok(())
}

fn log(plane: &Plane<'_>) -> String {
    let log = ["-n", NAMESPACE, "logs", "deployment/affinode-fleet", "--tail=20"];
    let said = plane.kubectl().args(log).output();
    said.map(|said| String::from_utf8_lossy(&said.stdout).into_owned()).unwrap_or_default()
}
