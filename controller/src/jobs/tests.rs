use super::*;

fn user(uid: u32, name: &str) -> JobUser {
    JobUser { uid, gid: uid, name: name.into() }
}

fn asked(namespace: &str, annotation: Option<&str>) -> JobRequest {
    let annotations = annotation.map(|name| (name.to_owned(), "5".to_owned()));
    JobRequest {
        name: "train".into(),
        namespace: namespace.into(),
        annotations: annotations.into_iter().collect(),
    }
}

#[test]
fn only_root_and_listed_users_may_run_jobs() {
    let (root, alice) = (user(0, "root"), user(1000, "alice"));
    assert!(permit(asked("", None), &root, &[]).is_ok());
    let refused = permit(asked("", None), &alice, &["bob".into()]).unwrap_err().to_string();
    assert!(refused.contains("alice") && refused.contains("jobs.users"), "{refused}");
    for allowed in ["alice", "*"] {
        let job = permit(asked("", None), &alice, &[allowed.into()]).unwrap();
        assert_eq!(job.namespace, "user-alice");
    }
}

#[test]
fn only_root_may_choose_a_namespace() {
    let (root, alice, allowed) = (user(0, "root"), user(1000, "alice"), ["*".to_owned()]);
    assert_eq!(permit(asked("ml", None), &root, &[]).unwrap().namespace, "ml");
    for (namespace, annotation) in [
        ("user-bob", None),
        ("kube-system", None),
        ("", Some("priority")),
        ("", Some("affinode.io/restore")),
    ] {
        assert!(permit(asked(namespace, annotation), &alice, &allowed).is_err());
    }
    let own = permit(asked("user-alice", Some("affinode.io/idle-timeout")), &alice, &allowed);
    assert_eq!(own.unwrap().annotations["affinode.io/idle-timeout"], "5");
    let roots = permit(asked("", Some("priority")), &root, &[]).unwrap();
    assert_eq!(roots.annotations["affinode.io/priority"], "5");
}

#[test]
fn names_are_words_of_bounded_size() {
    let root = user(0, "root");
    for name in ["", "a/b", "a b", "../x", &"x".repeat(129)] {
        let request = JobRequest { name: name.into(), ..JobRequest::default() };
        assert!(permit(request, &root, &[]).is_err(), "{name:?}");
    }
}
