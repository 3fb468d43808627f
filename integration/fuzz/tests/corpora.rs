//! Runs every fuzz target on its corpus, and on random changes of the corpus.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::{fs, path::Path};

use affinode_fuzz::TARGETS;
use proptest::{prelude::*, test_runner::TestRunner};

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let files = entries.map(|entry| fs::read(entry.unwrap().path()).unwrap());
    files.collect()
}

/// A random change of an input: a position, the number of bytes to replace, and the new bytes.
type Change = (prop::sample::Index, usize, Vec<u8>);

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for (place, removed, new) in changes {
        let at = place.index(bytes.len() + 1);
        let end = (at + removed).min(bytes.len());
        bytes.splice(at..end, new.iter().copied());
    }
    bytes
}

#[test]
fn targets_survive_corpus_and_mutations() {
    for (name, run) in TARGETS {
        let corpus = corpus(name);
        assert!(!corpus.is_empty(), "{name} has no corpus");
        corpus.iter().for_each(|bytes| run(bytes));
        let change =
            (any::<prop::sample::Index>(), 0_usize..9, prop::collection::vec(any::<u8>(), 0..9));
        let input = (prop::sample::select(corpus), prop::collection::vec(change, 1..6));
        let mut runner = TestRunner::new(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let result = runner.run(&input, |(bytes, changes)| {
            run(&changed(bytes, &changes));
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn corpora_are_small() {
    for (name, _) in TARGETS {
        let bytes: usize = corpus(name).iter().map(Vec::len).sum();
        assert!(
            bytes <= 128 << 10,
            "the corpus of {name} has {bytes} bytes; reduce it with `cargo xtask fuzz --keep`"
        );
    }
}
