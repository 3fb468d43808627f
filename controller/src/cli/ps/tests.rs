use super::*;

/// A script counts the lines.
#[test]
fn no_containers_without_headers_print_nothing() {
    let mut printed = Vec::new();
    show(&mut printed, &schema::Node::default(), OutputFormat::Table, false).unwrap();
    assert!(printed.is_empty(), "{}", String::from_utf8_lossy(&printed));
    show(&mut printed, &schema::Node::default(), OutputFormat::Table, true).unwrap();
    assert!(!printed.is_empty());
}
