//! Outcomes of a suite's tests, with the stock runtime and with Affinode.

use std::{collections::BTreeMap, fmt::Write};

use anyhow::{Context, Result};
use serde::Deserialize;

/// Outcome of one test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Pass,
    Fail,
    /// The test does not apply to this machine.
    Skip,
}

/// Outcomes of a suite's tests by name. Subtests are not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcomes(BTreeMap<String, Outcome>);

impl Outcomes {
    /// Parses the outcomes from the output of a Go test program with `-test.v`.
    pub fn parse(output: &str) -> Self {
        let ended = output.lines().filter_map(|line| {
            let (word, rest) = line.strip_prefix("--- ")?.split_once(": ")?;
            let outcome = match word {
                "PASS" => Outcome::Pass,
                "FAIL" => Outcome::Fail,
                "SKIP" => Outcome::Skip,
                _ => return None,
            };
            Some((rest.split_whitespace().next()?.to_owned(), outcome))
        });
        Self(ended.collect())
    }

    /// Parses the outcomes from Ginkgo's report (`-ginkgo.json-report`). A test that Ginkgo did not
    /// start has no outcome.
    pub fn of_ginkgo(report: &str) -> Result<Self> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Suite {
            spec_reports: Option<Vec<Spec>>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Spec {
            container_hierarchy_texts: Option<Vec<String>>,
            leaf_node_type: String,
            leaf_node_text: String,
            state: String,
            num_attempts: u32,
        }
        let suites: Vec<Suite> =
            serde_json::from_str(report).context("cannot parse Ginkgo's report")?;
        let specs = suites.into_iter().filter_map(|suite| suite.spec_reports).flatten();
        let tests = specs.filter(|spec| spec.leaf_node_type == "It" && spec.num_attempts > 0);
        let ended = tests.map(|spec| {
            let mut words = spec.container_hierarchy_texts.unwrap_or_default();
            words.push(spec.leaf_node_text);
            let outcome = match spec.state.as_str() {
                "passed" => Outcome::Pass,
                "skipped" | "pending" => Outcome::Skip,
                _ => Outcome::Fail,
            };
            (words.join(" "), outcome)
        });
        Ok(Self(ended.collect()))
    }

    /// Number of tests with an outcome.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    fn count(&self, outcome: Outcome) -> usize {
        self.0.values().filter(|ended| **ended == outcome).count()
    }
}

pub struct Comparison {
    stock: Outcomes,
    ours: Outcomes,
    /// Names of the tests that were run again because their first outcomes differed.
    again: Vec<String>,
}

impl Comparison {
    /// Compares two runs of one suite: with the stock runtime and with Affinode.
    pub fn new(stock: Outcomes, ours: Outcomes) -> Self {
        Self { stock, ours, again: Vec::new() }
    }

    /// Names of the tests whose outcomes differ between the two runs.
    pub fn differing(&self) -> Vec<String> {
        let names = self.stock.0.keys().chain(self.ours.0.keys());
        let mut names: Vec<String> =
            names.filter(|n| self.stock.0.get(*n) != self.ours.0.get(*n)).cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    /// Replaces the outcomes of some tests by those of a second run.
    pub fn again(&mut self, stock: &Outcomes, ours: &Outcomes) {
        self.again.extend(ours.0.keys().cloned());
        self.stock.0.extend(stock.0.clone());
        self.ours.0.extend(ours.0.clone());
    }

    /// Names of the tests that pass with the stock runtime but not with Affinode.
    pub fn regressions(&self) -> impl Iterator<Item = &str> {
        let passes = self.stock.0.iter().filter(|(_, ended)| **ended == Outcome::Pass);
        passes
            .filter(|(name, _)| self.ours.0.get(*name) != Some(&Outcome::Pass))
            .map(|(name, _)| name.as_str())
    }

    pub fn table(&self, title: &str, machine: &str) -> String {
        let mut text =
            format!("## {title}\n\n{machine}\n\n| | stock | Affinode |\n| --- | ---: | ---: |\n");
        for (word, outcome) in
            [("pass", Outcome::Pass), ("fail", Outcome::Fail), ("skip", Outcome::Skip)]
        {
            let (stock, ours) = (self.stock.count(outcome), self.ours.count(outcome));
            let _ = writeln!(text, "| {word} | {stock} | {ours} |");
        }
        let both: Vec<&str> = (self.stock.0.iter())
            .filter(|(name, ended)| {
                **ended == Outcome::Fail && self.ours.0.get(*name) == Some(*ended)
            })
            .map(|(name, _)| name.as_str())
            .collect();
        let worse: Vec<&str> = self.regressions().collect();
        let again: Vec<&str> = self.again.iter().map(String::as_str).collect();
        for (what, names) in [
            ("Pass with the stock runtime, not with Affinode", &worse),
            ("Fail with both", &both),
            ("Run again, alone, with both runtimes, because the first results differed", &again),
        ] {
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            let _ = write!(text, "\n{what}: {names}.\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOCK: &str = "=== RUN   TestA\n--- PASS: TestA (0.10s)\n--- FAIL: TestB (1.00s)\n    --- FAIL: TestB/part (0.1s)\n--- SKIP: TestC (0.00s)\nPASS\n";

    #[test]
    fn only_whole_tests_are_counted() {
        let outcomes = Outcomes::parse(STOCK);
        assert_eq!(outcomes.len(), 3);
        assert_eq!(outcomes.count(Outcome::Fail), 1);
    }

    #[test]
    fn ginkgo_report_counts_tests_that_ran() {
        let spec = |kind: &str, text: &str, state: &str, attempts: u32| {
            serde_json::json!({
                "ContainerHierarchyTexts": ["[k8s.io] Pod", "should"], "LeafNodeType": kind,
                "LeafNodeText": text, "State": state, "NumAttempts": attempts,
            })
        };
        let report = serde_json::json!([{"SpecReports": [
            spec("BeforeSuite", "", "passed", 1), spec("It", "start", "passed", 1),
            spec("It", "stop", "panicked", 1), spec("It", "label", "skipped", 1),
            spec("It", "left out", "skipped", 0),
        ]}]);
        let outcomes = Outcomes::of_ginkgo(&report.to_string()).unwrap();
        let named = |name: &str| outcomes.0.get(&format!("[k8s.io] Pod should {name}")).copied();
        assert_eq!(named("start"), Some(Outcome::Pass));
        assert_eq!(named("stop"), Some(Outcome::Fail));
        assert_eq!(named("label"), Some(Outcome::Skip));
        assert_eq!(outcomes.len(), 3);
        assert!(Outcomes::of_ginkgo("").is_err());
    }

    #[test]
    fn failure_with_affinode_alone_is_a_regression() {
        let stock = Outcomes::parse(STOCK);
        let failing = Outcomes::parse("--- FAIL: TestA (0.1s)\n--- FAIL: TestB (0.1s)\n");
        for ours in [failing, Outcomes::default()] {
            let mut comparison = Comparison::new(stock.clone(), ours);
            assert_eq!(comparison.regressions().collect::<Vec<_>>(), ["TestA"]);
            let passing = Outcomes::parse("--- PASS: TestA (0.1s)\n");
            comparison.again(&passing, &passing);
            assert_eq!(comparison.regressions().count(), 0);
        }
    }

    #[test]
    fn one_that_fails_with_both_is_none() {
        let comparison = Comparison::new(Outcomes::parse(STOCK), Outcomes::parse(STOCK));
        assert_eq!((comparison.regressions().count(), comparison.differing().len()), (0, 0));
        assert!(comparison.table("x", "y").contains("Fail with both: TestB."));
    }
}
