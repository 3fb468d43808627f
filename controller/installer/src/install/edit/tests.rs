use super::*;

const BLOCK: &str = "\n# >>> affinode: added by `affinode install`, removed by `affinode uninstall`\n[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.\"affinode\"]\nruntime_type = \"io.containerd.affinode.v1\"\n# <<< affinode\n";

fn spec() -> HandlerSpec {
    HandlerSpec::new("affinode", "/opt".as_ref(), None, false)
}

fn added(path: &Path, created: bool) -> AddedText {
    AddedText { path: path.to_owned(), text: BLOCK.into(), created }
}

fn edit_of(path: &Path) -> ConfigEdit {
    ConfigEdit::of([path.to_owned()]).unwrap()
}

fn removed(path: &Path, created: bool) -> Result<ConfigEdit, EditError> {
    let mut edit = edit_of(path);
    edit.remove_text(&added(path, created));
    edit.remove_handlers(&[spec()], &[]).map(|()| edit)
}

/// A text block is added to a file, and other text may be added after it. The removal of the block
/// must leave every other byte of the file unchanged.
#[test]
fn removal_restores_the_file_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    for text in ["version = 3", "version = 3\n", "# a comment\r\nversion = 3\n\n\n"] {
        fs::write(&path, text).unwrap();
        let mut edit = edit_of(&path);
        edit.append(&path, BLOCK);
        edit.make().unwrap();
        let with: Table = fs::read_to_string(&path).unwrap().parse().unwrap();
        assert!(handler::handler_of(&with, "affinode").is_some());
        fs::write(&path, fs::read_to_string(&path).unwrap() + "# later\n").unwrap();
        removed(&path, false).unwrap().make().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{text}# later\n"));
        edit.undo().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert!(removed(&path, false).unwrap().is_empty());
    }
}

/// NVIDIA's toolkit has rewritten the whole file, so the file no longer contains the added text
/// unchanged. The handler must still be found in the TOML tree and removed.
#[test]
fn a_rewritten_handler_is_removed_by_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    let text = format!("version = 3\n{BLOCK}").replace("\"affinode\"", "affinode");
    let sorted: Table = text.parse().unwrap();
    fs::write(&path, sorted.to_string()).unwrap();
    let edit = removed(&path, false).unwrap();
    assert!(edit.to_string().contains("- handler affinode"), "{edit}");
    edit.make().unwrap();
    let left: Table = fs::read_to_string(&path).unwrap().parse().unwrap();
    assert!(handler::handler_of(&left, "affinode").is_none());
    edit.undo().unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), sorted.to_string());
    // A handler of this name with another program must stay, unless a part of it is Affinode's.
    let other = text.replace("io.containerd.affinode.v1", "io.containerd.runc.v2");
    fs::write(&path, &other).unwrap();
    assert!(removed(&path, false).unwrap().is_empty());
    let mut part = edit_of(&path);
    part.remove_handlers(&[spec()], &["affinode"]).unwrap();
    assert!(!part.is_empty());
}

#[test]
fn our_own_file_is_removed_without_the_handler() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("99-zz-affinode.toml");
    fs::write(&path, format!("version = 3\n{BLOCK}").replace("\"affinode\"", "affinode")).unwrap();
    let mut edit = edit_of(&path);
    edit.remove_handlers(&[spec()], &[]).unwrap();
    edit.make().unwrap();
    assert!(!path.exists());
}

/// A text block is added to the template of k3s or rke2, and removed again. The predicted
/// configuration must be right both times. If the handler in the template was changed, the removal
/// must fail.
#[test]
fn a_template_is_added_to_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config-v3.toml.tmpl");
    let (base, root) = ("{{ template \"base\" . }}\n", "version = 3\n");
    let mut edit = edit_of(&path);
    edit.append(&path, &format!("{base}{BLOCK}"));
    edit.make().unwrap();
    // containerd starts with the rendered file, with the block and then without.
    let rendered = fs::read_to_string(&path).unwrap().replace(base, root);
    assert_eq!(edit.preview(root).parse::<Table>().unwrap(), rendered.parse().unwrap());
    let mut removal = edit_of(&path);
    removal.remove_text(&AddedText { text: format!("{base}{BLOCK}"), ..added(&path, true) });
    let without: Table = removal.preview(&rendered).parse().unwrap();
    assert_eq!(without, root.parse::<Table>().unwrap());
    removal.make().unwrap();
    assert!(!path.exists());
    fs::write(&path, format!("{base}{BLOCK}").replace("affinode.v1", "x")).unwrap();
    assert!(matches!(removed(&path, false), Err(EditError::Changed { .. })));
}

/// If the second file cannot be written, the first file is restored.
#[test]
fn all_files_are_written_or_none() {
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("1.toml");
    fs::write(&first, "version = 3\n").unwrap();
    let second = first.join("2.toml");
    let mut edit = ConfigEdit::of([first.clone()]).unwrap();
    edit.files.push(FileEdit {
        path: second.clone(),
        before: None,
        after: None,
        shown: Vec::new(),
    });
    edit.append(&first, BLOCK);
    edit.append(&second, BLOCK);
    assert!(edit.make().is_err());
    assert_eq!(fs::read_to_string(&first).unwrap(), "version = 3\n");
}
