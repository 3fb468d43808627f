//! Tests of the command `kubectl affinode report`.

use affinode_controller::schema::{Report, ReportRow};

use crate::{Stage, agent::node};

fn row(namespace: &str, pod: &str, idle_s: f64, returned_s: f64) -> ReportRow {
    ReportRow {
        namespace: namespace.into(),
        pod: pod.into(),
        container: "main".into(),
        used_gpu_seconds: 3600.0,
        idle_gpu_seconds: idle_s,
        returned_gpu_seconds: returned_s,
        offloads: 3,
        calls: 7,
        claim: format!("{namespace}/{pod}"),
        requested_gpu_seconds: 7200.0,
        resident_gpu_seconds: 3600.0 + idle_s,
    }
}

fn report(price: f64, rows: Vec<ReportRow>) -> Report {
    Report { price_per_gpu_hour: price, currency: "EUR".into(), rows, ..Report::default() }
}

/// Creates two nodes with the same price, and containers in two namespaces.
async fn stage() -> Stage {
    let stage = Stage::new().await;
    let one = vec![row("ml", "notebook", 0.0, 7200.0), row("web", "server", 1800.0, 0.0)];
    let two = vec![row("ml", "agent", 0.0, 36000.0)];
    for (name, rows) in [("one", one), ("two", two)] {
        let agent = stage.node(name, Some(node(Vec::new()))).await;
        *agent.report.lock().unwrap() = report(2.0, rows);
    }
    stage
}

#[tokio::test]
async fn a_namespace_of_all_nodes_is_reported() {
    let printed = stage().await.run("report").await;
    let rows = printed.rows();
    assert_eq!(printed.status, 0, "{printed}");
    assert_eq!(rows[1], ["two", "ml/agent/main", "1.00", "0.00", "10.00", "3", "20.00"]);
    assert_eq!(rows[2], ["one", "ml/notebook/main", "1.00", "0.00", "2.00", "3", "4.00"]);
    assert_eq!(rows[3], ["all", "2.00", "0.00", "12.00", "6", "24.00"], "{printed}");
    assert!(printed.out.lines().next().unwrap().ends_with("FREED, EUR"), "{printed}");
}

#[tokio::test]
async fn rows_are_summed_by_namespace_or_node() {
    let stage = stage().await;
    let namespaces = stage.run("report -A --by namespace --no-headers").await;
    let rows = namespaces.rows();
    assert_eq!(rows[0], ["ml", "2.00", "0.00", "12.00", "6", "24.00"], "{namespaces}");
    assert_eq!(rows[1], ["web", "1.00", "0.50", "0.00", "3", "0.00"], "{namespaces}");
    let nodes = stage.run("report -A --by node -o csv").await;
    let lines: Vec<&str> = nodes.out.lines().collect();
    let of_two = "two,,,,3600.000,0.000,36000.000,3,7,20.0000,EUR,\
                  7200.000,3600.000,4.0000,2.0000,2.0000,";
    assert_eq!(lines[1], of_two, "{nodes}");
    let of_one = "one,,,,7200.000,1800.000,7200.000,6,14,4.0000,EUR,\
                  14400.000,9000.000,8.0000,4.0000,5.0000,";
    assert_eq!(lines[2], of_one, "{nodes}");
}

#[tokio::test]
async fn claims_and_teams_have_lines() {
    let stage = stage().await;
    let claims = stage.run("report -A --by claim -o wide").await;
    let rows = claims.rows();
    assert!(claims.out.lines().next().unwrap().contains("REQUESTED"), "{claims}");
    let expected = ["ml/agent", "1.00", "0.00", "10.00", "3", "2.00", "1.00", "0%", "7", "4.00"];
    assert_eq!(rows[1][..10], expected, "{claims}");
    assert_eq!([rows[2][0], rows[3][0]], ["ml/notebook", "web/server"], "{claims}");
    let teams = stage.run("report -A --by team --no-headers").await;
    assert_eq!(teams.rows()[0][..2], ["ml", "2.00"], "{teams}");
}

#[tokio::test]
async fn different_prices_are_not_summed() {
    let stage = stage().await;
    let agent = stage.node("three", Some(node(Vec::new()))).await;
    *agent.report.lock().unwrap() = report(3.0, vec![row("ml", "other", 0.0, 0.0)]);
    let printed = stage.run("report").await;
    assert_eq!(printed.status, 0, "{printed}");
    assert!(!printed.out.contains("EUR"), "{printed}");
    let json = stage.run("report -o json").await.json();
    assert!(json["price_per_gpu_hour"].is_null(), "{json}");
    assert_eq!(json["rows"][0]["node"], "two", "{json}");
    let csv = stage.run("report -o csv --no-headers").await;
    let has_price = |line: &str| line.split(',').skip(9).take(2).any(|field| !field.is_empty());
    assert!(!csv.out.lines().any(has_price), "{csv}");
}

/// A node has no controller, so it is missing from the report. The command must fail and name the
/// node, because the report shows too few GPU hours.
#[tokio::test]
async fn a_node_without_a_controller_is_named() {
    let stage = stage().await;
    stage.node("empty", None).await;
    let printed = stage.run("report").await;
    assert_eq!((printed.status, printed.rows().len()), (1, 4), "{printed}");
    assert!(printed.err.contains("node empty: no controller runs"), "{printed}");
    let one = stage.run("report --node one -o json").await;
    assert_eq!((one.status, one.json()["nodes"].as_array().unwrap().len()), (0, 1), "{one}");
}

#[tokio::test]
async fn container_without_a_pod_has_a_name() {
    let stage = Stage::new().await;
    let agent = stage.node("one", Some(node(Vec::new()))).await;
    *agent.report.lock().unwrap() =
        report(0.0, vec![ReportRow { container: String::new(), ..row("", "", 0.0, 0.0) }]);
    for by in ["container", "pod", "namespace"] {
        let printed = stage.run(&format!("report -A --no-headers --by {by}")).await;
        assert!(printed.out.lines().next().unwrap().contains("(no pod)"), "{by}: {printed}");
    }
}

/// Two nodes have history since different times. The report must show the later time as the start
/// of their common history.
#[tokio::test]
async fn start_of_the_common_history_is_shown() {
    let stage = Stage::new().await;
    for (name, oldest_unix_ms) in [("one", 5_000), ("two", 7_000)] {
        let agent = stage.node(name, Some(node(Vec::new()))).await;
        *agent.report.lock().unwrap() =
            Report { oldest_unix_ms: Some(oldest_unix_ms), ..report(0.0, Vec::new()) };
    }
    let json = stage.run("report -A -o json").await.json();
    assert_eq!(json["oldest_unix_ms"], 7_000, "{json}");
}

#[tokio::test]
async fn the_time_range_is_asked() {
    let stage = stage().await;
    let json = stage.run("report --since 90m -o json").await.json();
    let range = json["until_unix_ms"].as_i64().unwrap() - json["since_unix_ms"].as_i64().unwrap();
    assert_eq!(range, 90 * 60 * 1000, "{json}");
    assert_eq!(stage.run("report --since never").await.status, 2);
}
