//! Checks of the page of all nodes, which is requested as a browser does.

use std::time::Duration;

use affinode_e2e::{containerd, wait::until_within};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{NAMESPACE, fetch, step};
use crate::{
    k8s::{control_plane::Plane, node::Node},
    output,
};

/// Time limit until the page's reply shows an expected state.
const REPLY_TIMEOUT: Duration = Duration::from_secs(90);

/// An account with a token for requests to the page of all nodes.
pub struct Looker<'a> {
    plane: &'a Plane<'a>,
    base: String,
    token: String,
}

impl<'a> Looker<'a> {
    /// Creates an account and grants it permission to read the page.
    pub fn new(plane: &'a Plane<'a>) -> Result<Self> {
        let stranger = Self::stranger(plane)?;
        stranger.is_let()?;
        Ok(stranger)
    }

    /// Creates an account without any permission.
    fn stranger(plane: &'a Plane<'a>) -> Result<Self> {
        let ready = ["-n", NAMESPACE, "rollout", "status", "deployment/affinode-fleet"];
        containerd::run(plane.kubectl().args(ready).arg("--timeout=180s"))?;
        let fleet = ["pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=fleet"];
        let pods = plane.get(&fleet)?;
        let address = pods["items"][0]["status"]["podIP"]
            .as_str()
            .context("the pod of the page has no address")?;
        let base = format!("https://{address}:8443");
        containerd::run(plane.kubectl().args(["create", "serviceaccount", "looker"]))?;
        let token = containerd::run(plane.kubectl().args(["create", "token", "looker"]))?;
        Ok(Self { plane, base, token })
    }

    fn is_let(&self) -> Result<()> {
        let bind = ["create", "clusterrolebinding", "looker", "--clusterrole=affinode-viewer"];
        let whom = "--serviceaccount=default:looker";
        containerd::run(self.plane.kubectl().args(bind).arg(whom)).map(|_| ())
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn get(&self, path: &str) -> Result<(u16, String)> {
        fetch(self.plane, &self.url(path), Some(&self.token))
    }

    /// The page's row of a node. Waits until the row satisfies `is_it`.
    pub fn row(&self, node: &str, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
        let mut last = String::new();
        // The page caches an earlier denial for 10 s, and then polls the nodes.
        let row = until_within(REPLY_TIMEOUT, &format!("the page to show {node} so"), || {
            let (code, text) = self.get("/api/v1/fleet")?;
            let list: Value = serde_json::from_str(&text).unwrap_or_default();
            let row =
                list["nodes"].as_array().into_iter().flatten().find(|row| row["name"] == node);
            let row = row.filter(|row| code == 200 && is_it(row)).cloned();
            last = text;
            Ok(row)
        });
        row.with_context(|| format!("the last row was {last}\n{}", log(self.plane)))
    }

    /// Deletes the account and its rights.
    pub fn done(self) -> Result<()> {
        for what in ["clusterrolebinding", "serviceaccount"] {
            containerd::run(self.plane.kubectl().args(["delete", what, "looker"]))?;
        }
        Ok(())
    }
}

/// Checks that an account with permission sees all nodes and can open the dashboard of each node,
/// and that other accounts see nothing.
pub fn shows_nodes(plane: &Plane<'_>) -> Result<()> {
    step("The page of all nodes");
    let looker = Looker::stranger(plane)?;
    let (page, text) = fetch(plane, &looker.url("/"), None)?;
    ensure!(
        page == 200 && text.contains("all nodes"),
        "expected the page of all nodes, got status {page}: {text}"
    );
    let nodes = plane.nodes().iter().map(|node| format!("/nodes/{}/api/v1/node", node.name));
    for path in nodes.chain(["/api/v1/fleet".into()]) {
        let (none, _) = fetch(plane, &looker.url(&path), None)?;
        let (stranger, _) = looker.get(&path)?;
        ensure!(
            (none, stranger) == (401, 403),
            "{path}: expected 401 without a token and 403 without the right, got {none} and {stranger}"
        );
    }
    looker.is_let()?;
    output::note("without a token: 401; account without the right: 403; account with it:");
    for node in plane.nodes() {
        let row = looker.row(&node.name, |row| row["health"] == "Serving")?;
        let known = |what: &str| row["figures"][what].as_u64().unwrap_or_default();
        ensure!(
            known("gpus") == 1 && row["figures"]["simulated"] == true,
            "expected one simulated GPU: {row}"
        );
        ensure!(known("resident") + known("offloaded") == 1, "expected one container: {row}");
        output::note(&row.to_string());
        leads_to(&looker, node)?;
    }
    output::note("each name leads to the node's own API with the same token: read, not move");
    looker.done()
}

/// Checks that the path of a node on the page leads to the dashboard and API of this node.
fn leads_to(looker: &Looker<'_>, node: &Node<'_>) -> Result<()> {
    let path = |below: &str| format!("/nodes/{}/{below}", node.name);
    let own = until_within(REPLY_TIMEOUT, "the node's own API", || {
        let (code, text) = looker.get(&path("api/v1/node"))?;
        Ok((code == 200).then_some(text))
    })?;
    let pods = looker.plane.get(&["pods", "-l", "affinode.io/gpu-state"])?;
    for pod in pods["items"].as_array().context("kubectl printed no list of pods")? {
        let name = pod["metadata"]["name"].as_str().context("a pod has no name")?;
        let here = pod["spec"]["nodeName"] == *node.name;
        let shown = own.contains(&format!("\"pod\":\"{name}\""));
        ensure!(
            here == shown,
            "pod {name} of node {} is missing from its node's reply, or is in that of another \
             node: {own}",
            pod["spec"]["nodeName"]
        );
    }
    let bearer = format!("Authorization: Bearer {}", looker.token.trim());
    let curl = |words: &[&str]| {
        let mut curl = looker.plane.world().keeper().command("curl".as_ref());
        curl.args(["--silent", "--insecure", "--header", &bearer]).args(words);
        curl
    };
    let events = looker.url(&path("api/v1/events?watch=node"));
    // The stream has no end, so curl stops at its time limit.
    let said = curl(&["--no-buffer", "--max-time", "5", &events]).output()?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    ensure!(
        said.contains("event: node") && said.contains("\"pod\":\"trainer"),
        "expected an event with the pod, got {said}"
    );
    let offload = looker.url(&path("api/v1/auto-offload/off"));
    let post = ["--request", "POST", "--write-out", "\n%{http_code}", &offload];
    let said = containerd::run(&mut curl(&post))?;
    ensure!(
        said.ends_with("403") && said.contains("may not post"),
        "expected 403 for an account that may only read, got {said}"
    );
    let (page, text) = fetch(looker.plane, &looker.url(&path("")), None)?;
    ensure!(
        page == 200 && text.contains("app.js"),
        "expected the node's dashboard, got status {page}: {text}"
    );
    Ok(())
}

fn log(plane: &Plane<'_>) -> String {
    let log = ["-n", NAMESPACE, "logs", "deployment/affinode-fleet", "--tail=20"];
    let said = plane.kubectl().args(log).output();
    said.map(|said| String::from_utf8_lossy(&said.stdout).into_owned()).unwrap_or_default()
}
