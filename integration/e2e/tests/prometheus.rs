//! Test with a real Prometheus, which scrapes a node. Every query of the Grafana dashboards must
//! find data.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
};

use affinode_e2e::{artifacts::workspace_dir, testbed::TestbedConfig, wait::until, worker::Worker};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

struct Prometheus(Child);

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

fn ask(address: SocketAddr, method: &str, path: &str, host: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) =
        answer.split_once("\r\n\r\n").context("the response has no end of its head")?;
    let status = head.split(' ').nth(1).context("the response has no status")?.parse()?;
    Ok((status, body.to_owned()))
}

/// Returns every query expression of every Grafana dashboard, with its variables filled in.
fn queries() -> Result<BTreeSet<String>> {
    let mut queries = BTreeSet::new();
    for entry in std::fs::read_dir(workspace_dir().join("config/grafana"))? {
        let board: Value = serde_json::from_str(&std::fs::read_to_string(entry?.path())?)?;
        for panel in board["panels"].as_array().context("the dashboard has no panels")? {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let query =
                    target["expr"].as_str().context("the panel's target has no expression")?;
                let query = query.replace("$__range", "15m");
                let query = query.replace("$price", "2").replace("$cluster", ".*");
                let query = query.replace("$node", ".*").replace("$namespace", ".*");
                ensure!(!query.contains('$'), "an unknown variable in {query}");
                // Queries for metrics of node agents are left out, because agents run only in a
                // cluster.
                if !query.contains("affinode_agent_") {
                    queries.insert(query);
                }
            }
        }
    }
    ensure!(queries.len() > 20, "expected more than 20 queries, found {queries:?}");
    Ok(queries)
}

fn encoded(query: &str) -> String {
    query.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[test]
fn prometheus_scrapes_and_dashboards_have_data() -> Result<()> {
    if Command::new("prometheus").arg("--version").stdout(Stdio::null()).status().is_err() {
        if std::env::var_os("AFFINODE_NEEDS_PROMTOOL").is_some() {
            bail!("no prometheus in the PATH");
        }
        affinode_test_notes::skip("prometheus", "prometheus (Debian) is missing");
        return Ok(());
    }
    let node = free_address()?;
    let policy = "mode = \"manual\"\nidle_timeout = \"200ms\"";
    let config = format!("[policy]\n{policy}\n[http]\nlisten = \"{node}\"\n");
    let world = TestbedConfig::default().config(&config).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    let _offloaded = Worker::start(&world, "offloaded", 64)?;

    let scraper = free_address()?;
    let folder = world.dir().join("prometheus");
    std::fs::create_dir(&folder)?;
    // The configuration of docs/operations.md for nodes without the chart, here without HTTPS, because
    // Prometheus runs on the same machine.
    let target = format!("{{ targets: [ \"{node}\" ], labels: {{ node: one }} }}");
    let rules = workspace_dir().join("config/prometheus/affinode.rules.yml");
    let scrape = format!(
        "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\n\
         rule_files: [ \"{}\" ]\nscrape_configs:\n\
         - {{ job_name: affinode, static_configs: [ {target} ] }}\n",
        rules.display()
    );
    std::fs::write(folder.join("prometheus.yml"), scrape)?;
    let log = std::fs::File::create(folder.join("log"))?;
    let _prometheus = Prometheus(
        Command::new("prometheus")
            .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address={scraper}"))
            .stderr(log)
            .spawn()?,
    );

    // The following steps produce data for all metrics: moves, a refused move, and an unmanaged
    // process.
    world.cli().move_out("offloaded")?;
    world.cli().move_out("worker")?;
    assert!(worker.verify()?);
    world.cli().run(&["pin", "worker"])?;
    let refused = world.cli().output(&["offload", "worker"])?;
    assert_eq!(refused.status.code(), Some(1), "the offload of a pinned container was not refused");
    assert_eq!(ask(node, "GET", "/metrics", "stranger.example")?.0, 421);

    let mut left = queries()?;
    let mut last = String::new();
    until("every query to find data", || {
        let mut empty = BTreeSet::new();
        for query in &left {
            let path = format!("/api/v1/query?query={}", encoded(query));
            let Ok((200, body)) = ask(scraper, "GET", &path, "localhost") else {
                empty.insert(query.clone());
                continue;
            };
            let answer: Value = serde_json::from_str(&body)?;
            let found = answer["data"]["result"].as_array().is_some_and(|r| !r.is_empty());
            if !found {
                empty.insert(query.clone());
            }
        }
        left = empty;
        last = format!("{left:#?}");
        Ok(left.is_empty().then_some(()))
    })
    .with_context(|| format!("these queries find no data: {last}"))
}
