use super::*;

/// Without containers and without headers, `affinode ps` must print nothing, because a script may
/// count the printed lines.
#[test]
fn no_containers_without_headers_print_nothing() {
    let mut printed = Vec::new();
    show(&mut printed, &schema::Node::default(), OutputFormat::Table, false).unwrap();
    assert!(printed.is_empty(), "{}", String::from_utf8_lossy(&printed));
    show(&mut printed, &schema::Node::default(), OutputFormat::Table, true).unwrap();
    assert!(!printed.is_empty());
}

#[test]
fn content_on_disk_is_not_in_host_memory() {
    for (disk_gib, shown) in
        [(0, "25.0 GiB"), (24, "1024 MiB, on disk 24.0 GiB"), (25, "on disk 25.0 GiB")]
    {
        let container = schema::Container {
            offloaded_bytes: 25 << 30,
            disk_bytes: disk_gib << 30,
            ..Default::default()
        };
        assert_eq!(row(&container, 0, false)[4], shown);
        assert_eq!(row(&container, 0, true)[6], shown);
    }
}

#[test]
fn wide_row_says_what_stays_and_why() {
    let mut container = schema::Container { staying_bytes: 30 << 30, ..Default::default() };
    let stays = |container: &schema::Container| row(container, 0, true).swap_remove(7);
    assert_eq!(stays(&container), "30.0 GiB: context");
    container.staying_reasons = vec!["managed-memory".into(), "shared-memory".into()];
    assert_eq!(stays(&container), "30.0 GiB: managed-memory, shared-memory");
    container.staying_bytes = 0;
    assert_eq!(stays(&container), "-");
    assert_eq!(row(&container, 0, true).len(), WIDE.len());
}
