//! Tests that each marker is counted, and that limits are only lowered.

use super::*;

fn counts_of(files: &[(&str, &str)]) -> Counts {
    let folder = tempfile::tempdir().expect("a folder");
    for (path, text) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
        fs::write(path, text).expect("a file");
    }
    count(folder.path()).expect("counts")
}

#[test]
fn markers_follow_their_expressions() {
    let [nobody, who, so_many, of_one, home, away] = MARKERS.map(|(_, of)| of);
    assert_eq!((nobody("Nobody, or anybody."), nobody("a nobody_x")), (1, 0));
    assert_eq!(who("who asks; whoever comes, knows who it is (who else)"), 3);
    assert_eq!(who("the one who asks, whose"), 0);
    assert_eq!((so_many("for so long."), so_many("So many of them")), (1, 1));
    assert_eq!((so_many("so long as it runs"), so_many("also much")), (0, 0));
    assert_eq!((of_one("the name of one that"), of_one("of one than that")), (1, 0));
    assert_eq!((home("comes Home."), home("homes"), home("HOME_DIR")), (1, 0, 0));
    assert_eq!((away("goes away"), away("always")), (1, 0));
}

#[test]
fn each_scope_is_counted_by_itself() {
    let counts = counts_of(&[
        ("proto/src/a.rs", "// Nobody.\nconst A: &str = \"nobody\";\nfn nobody() {}\n"),
        ("README.md", "nobody\nnobody\n"),
        ("config/a.yaml", "# nobody, and\n# nobody\nx: nobody\n"),
        ("config/b.png", "nobody"),
        ("target/c.rs", "// nobody\n"),
    ]);
    let of = |scope: &str| counts[&format!("{scope}.nobody")];
    assert_eq!(["comments", "strings", "markdown", "config"].map(of), [1, 1, 2, 3]);
}

#[test]
fn rust_items_are_counted() {
    let name = "a".repeat(46);
    let text = format!(
        "/// Three words here.\nstruct One;\n/// Four words are fine.\npub(crate) enum TwoWords {{}}\n\
         const MOST_BYTES: u8 = 1;\npub const LONGEST: u8 = 1;\nconst MAX: u8 = 1;\n\
         #[test]\nfn {name}() {{}}\nfn {name}b() {{}}\n#[tokio::test]\nasync fn {name}c() {{}}\n"
    );
    let counts = counts_of(&[("controller/src/a.rs", &text)]);
    assert_eq!(counts["rust.short-docs"], 1);
    assert_eq!(counts["rust.one-word-type-names-percent"], 50);
    assert_eq!(counts["rust.most-least-longest-constants"], 2);
    assert_eq!(counts["rust.test-names-over-45-characters"], 2);
}

#[test]
fn limits_only_go_down() {
    let text = "# Limits.\na 5\nb 2\nc 0\n";
    let limits = parse_limits(text).expect("limits");
    let counts = Counts::from([("a".into(), 3), ("b".into(), 4), ("d".into(), 1)]);
    assert_eq!(above(&limits, &counts), ["b: 4, the limit is 2", "d: 1, there is no limit"]);
    let loose = ["a: 3, the limit is 5", "c: nothing is counted under this name"];
    assert_eq!(slack(&limits, &counts), loose);
    assert_eq!(lowered(text, &counts), "# Limits.\na 3\nb 2\nc 0\n");
    assert!(parse_limits("a five\n").is_err() && parse_limits("a 1\na 2\n").is_err());
}

#[test]
fn words_of_code_blocks_do_not_count() {
    let text =
        "# A title\n\none two\nthree\n\n```\nfour five\n```\n- six\n- seven eight\n\n| a | b |\n";
    assert_eq!(markdown_words(text), (3 + 3 + 5 + 5, 3));
}
