//! Tests that `config/openapi.yaml` names exactly the fields that the API sends.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::{collections::BTreeSet, fs, path::Path};

use affinode_controller::{
    call_trace::{CallTraceBatch, FunctionCalls, ProcessCalls, RecordedCall},
    history::StateSpan,
    observe::ViewChange,
    schema::{Action, Container, DeviceBytes, Event, Gpu, Node, Process, Report, ReportRow},
};
use affinode_proto::event::EventKind;
use serde_json::Value;

fn document() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/openapi.yaml");
    serde_yaml_ng::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn keys(object: &Value) -> BTreeSet<String> {
    object.as_object().unwrap_or_else(|| panic!("{object}")).keys().cloned().collect()
}

fn sent(value: impl serde::Serialize) -> Value {
    serde_json::to_value(value).unwrap()
}

#[test]
fn fields_are_those_that_are_sent() {
    let document = document();
    let schemas = &document["components"]["schemas"];
    let change =
        ViewChange { node: Some(Node::default()), containers: Vec::new(), gone: Vec::new() };
    let sent = [
        ("Node", sent(Node::default())),
        ("Gpu", sent(Gpu::default())),
        ("Container", sent(Container::default())),
        ("Process", sent(Process::default())),
        ("DeviceBytes", sent(DeviceBytes::default())),
        ("Event", sent(Event::default())),
        ("Change", sent(change)),
        ("Action", sent(Action::default())),
        ("Span", sent(StateSpan::default())),
        ("Report", sent(Report::default())),
        ("CallBatch", sent(CallTraceBatch::default())),
        ("ProcessCalls", sent(ProcessCalls::default())),
        ("FunctionCalls", sent(FunctionCalls::default())),
        ("RecordedCall", sent(RecordedCall::default())),
    ];
    for (name, value) in &sent {
        assert_eq!(keys(&schemas[*name]["properties"]), keys(value), "{name}");
    }
    let rows = &schemas["Report"]["properties"]["rows"]["items"]["properties"];
    assert_eq!(keys(rows), keys(&serde_json::to_value(ReportRow::default()).unwrap()));
    let known: BTreeSet<String> = sent.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(keys(schemas), known, "a schema that nothing is compared with");
}

#[test]
fn every_event_kind_is_named() {
    let document = document();
    let kind = &document["components"]["schemas"]["Event"]["properties"]["kind"]["description"];
    let words: Vec<&str> = kind.as_str().unwrap().split(", ").collect();
    let known: Vec<&str> = EventKind::ALL.iter().map(|kind| kind.as_str()).collect();
    assert_eq!(words, known);
}

#[test]
fn every_reference_leads_somewhere() {
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(object) => {
                for (name, value) in object {
                    match value {
                        Value::String(to) if name == "$ref" => found.push(to.clone()),
                        other => references(other, found),
                    }
                }
            }
            Value::Array(all) => all.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let document = document();
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 10, "{found:?}");
    for reference in found {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
}
