//! Tests of the built library file. It must load into any process, so it must not depend on any
//! other library.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use std::collections::BTreeSet;
use std::process::Command;

fn output(tool: &str, arguments: &[&str]) -> String {
    let done = Command::new(tool).args(arguments).arg(support::library()).output().unwrap();
    assert!(done.status.success(), "{tool} {arguments:?}");
    String::from_utf8(done.stdout).unwrap()
}

#[test]
fn it_needs_no_library_and_no_symbol_version() {
    let dynamic = output("readelf", &["-dW"]);
    assert!(dynamic.contains("SONAME"), "{dynamic}");
    assert!(!dynamic.contains("NEEDED"), "{dynamic}");
    assert!(!dynamic.contains("VER"), "{dynamic}");
    assert!(!dynamic.contains("INIT"), "no constructor: {dynamic}");
    assert!(!dynamic.contains("TEXTREL"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    for table in ["(HASH)", "(GNU_HASH)"] {
        assert!(dynamic.contains(table), "{table} missing: {dynamic}");
    }
    assert!(!output("readelf", &["-SW"]).contains(".gnu.version"));
}

#[test]
fn every_undefined_symbol_is_weak() {
    let undefined = output("nm", &["-D", "--undefined-only"]);
    for line in undefined.lines() {
        assert_eq!(line.split_whitespace().next(), Some("w"), "{line}");
    }
    assert!(undefined.contains("dl_iterate_phdr"));
}

#[test]
fn library_defines_dlsym_and_listed_functions() {
    let defined = output("nm", &["-D", "--defined-only"]);
    let defined: BTreeSet<&str> =
        defined.lines().filter_map(|line| line.split_whitespace().last()).collect();
    let mut expected: BTreeSet<&str> = (1..=affinode_cuda_sys::hook::COUNT as u32)
        .filter_map(affinode_cuda_sys::hook::name)
        .collect();
    expected.extend((0..affinode_cuda_sys::nvml::COUNT).filter_map(affinode_cuda_sys::nvml::name));
    expected.extend(["dlsym", "cuGetProcAddress", "cuGetProcAddress_v2"]);
    let difference: Vec<_> = defined.symmetric_difference(&expected).collect();
    assert!(difference.is_empty(), "{difference:?}");
}

#[test]
fn no_code_in_it_can_panic() {
    let symbols = output("nm", &[]);
    assert!(symbols.contains("affinode_thunk"), "the symbols that this test reads are stripped");
    let panics: Vec<_> = symbols.lines().filter(|l| l.contains("panic")).collect();
    assert!(panics.is_empty(), "{panics:#?}");
}

#[test]
fn process_without_cuda_has_few_relocations() {
    let relocations = output("readelf", &["-rW"]);
    let count = relocations.matches("R_X86_64_").count();
    assert!(count < 64, "{count} relocations in every process: {relocations}");
}
