//! Plans how an installation or an uninstallation changes Affinode's handler in containerd's
//! configuration.
//!
//! | containerd's whole configuration contains | what the installation does |
//! | --- | --- |
//! | the wanted handler, in any file | records the handler |
//! | no handler of this name | adds the wanted handler |
//! | another handler with Affinode's program | removes that handler from every file and adds the wanted handler |
//! | a handler with another program | fails |
//!
//! If a distribution writes containerd's files itself (k0s, MicroK8s), the installation does not
//! edit them. It uses a handler that an operator has added, and fails if there is none.
//!
//! A handler of an earlier `--runtime-name` is kept while a shim runs, because containerd needs
//! this handler to restart a container of a running pod.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use toml::{Table, Value};

use super::{
    InstallError, InstallOptions,
    block::{self, BlockError},
    containerd::{self, ContainerdNode},
    edit::{AddedText, ConfigEdit, EditError},
    handler::{self, HandlerSpec, HandlerVerdict},
    record::{AddedBlock, InstallRecord},
    target::{self, InstallTarget},
};
use crate::doctor::{cdi, handler::PLUGINS, imports};

/// First line of a template that extends the built-in template of k3s and rke2.
const BASE: &str = "{{ template \"base\" . }}";

/// Changes that an installation plans for Affinode's runtime handler in containerd's configuration.
/// Also contains what the installation's record will state about the handler.
#[derive(Default)]
pub struct HandlerPlan {
    /// The edit of containerd's files. `None`: no file is changed.
    pub edit: Option<ConfigEdit>,
    /// The handler that this installation adds. `None`: no handler is added.
    pub wanted: Option<HandlerSpec>,
    /// Whether the wanted handler replaces a handler of the same name that also runs Affinode's
    /// shim but differs from the wanted handler.
    pub replaces: bool,
    /// Handlers that containerd's configuration must no longer contain after the change.
    pub gone: Vec<HandlerSpec>,
    /// Whether containerd must be restarted.
    pub restarts: bool,
    /// Entry for the installation's record that describes the wanted handler.
    pub block: Option<AddedBlock>,
    /// Handlers of earlier names that stay in containerd's configuration.
    pub former: Vec<AddedBlock>,
    /// File that already contains the wanted handler. In this case, the installation only records
    /// the handler.
    pub adopted: Option<PathBuf>,
}

impl HandlerPlan {
    /// Plans to record a handler that containerd's configuration already contains.
    fn adopt(&mut self, name: &str, node: &ContainerdNode, cdi: bool) {
        let files = node.naming(name);
        let newest = files.iter().map(|file| written(file)).max().unwrap_or(UNIX_EPOCH);
        self.restarts = !node.runs_since(newest);
        let path = files.last().cloned().unwrap_or_else(|| node.config_file());
        self.adopted = Some(path.clone());
        self.block = Some(AddedBlock::of(name, path, node, cdi));
    }

    /// Returns whether containerd's files are as they were before the change.
    pub fn is_undone(&self) -> bool {
        self.edit.as_ref().is_none_or(ConfigEdit::is_undone)
    }

    /// Returns the names of the wanted handler and of the handlers that the change removes.
    pub fn names(&self) -> Vec<String> {
        self.wanted.iter().chain(&self.gone).map(|spec| spec.name.clone()).collect()
    }
}

/// Plans an installation for a containerd whose whole configuration is `dump`. `older` is the
/// record of the present installation.
pub fn install(
    options: &InstallOptions,
    older: Option<&InstallRecord>,
    node: &ContainerdNode,
    dump: &Table,
) -> Result<HandlerPlan, InstallError> {
    let known = older.into_iter().flat_map(InstallRecord::blocks).cloned();
    let (recorded, former): (Vec<_>, Vec<_>) =
        known.partition(|block| block.runtime_name == options.runtime_name);
    let cdi = uses_cdi(older, node, dump);
    let spec = HandlerSpec::new(&options.runtime_name, &options.prefix, older, cdi);
    let verdict = spec.judge(dump);
    if verdict == HandlerVerdict::Foreign {
        return Err(BlockError::Taken(spec.name).into());
    }
    node.finds_shim(&options.prefix, dump)?;
    let waits =
        verdict == HandlerVerdict::Absent && recorded.iter().any(|block| node.renders(block));
    let managed = node.managed();
    // An operator wrote this handler, and the installation could not change it.
    let by_hand = managed.is_some() && verdict == HandlerVerdict::Differs;
    let stays = waits || by_hand || verdict == HandlerVerdict::Same;
    let in_use =
        !former.is_empty() && (managed.is_some() || containerd::running_shims(&options.prefix) > 0);
    let (former, retired) = if in_use { (former, Vec::new()) } else { (Vec::new(), former) };
    let gone = retired.iter().map(|block| spec.named(&block.runtime_name)).collect();
    let mut plan = HandlerPlan {
        edit: None,
        wanted: Some(spec.clone()),
        replaces: verdict == HandlerVerdict::Differs && !by_hand,
        gone,
        restarts: true,
        block: recorded.first().cloned(),
        former,
        adopted: None,
    };
    if stays && plan.block.is_none() {
        plan.adopt(&spec.name, node, cdi);
    } else if stays {
        plan.restarts = older.is_some_and(|older| !older.settled);
    }
    if stays && plan.gone.is_empty() {
        return Ok(plan);
    }
    if let Some(managed) = managed {
        return Err(managed.into());
    }
    let target = node.target(dump);
    let mut edit = ConfigEdit::of(files(Some(&target), Some(node), older))?;
    let old = recorded.iter().filter(|_| !stays).chain(&retired);
    old.clone().flat_map(AddedBlock::texts).for_each(|text| edit.remove_text(&text));
    let mut specs = plan.gone.clone();
    specs.extend(Some(spec.clone()).filter(|_| !stays));
    edit.remove_handlers(&specs, &merged(&specs, dump))?;
    if !stays {
        let mut texts = add(&mut edit, &target, node, dump, &spec)?;
        // Until containerd serves the new handler, the files may still contain the old texts.
        // Therefore the record keeps these texts.
        texts.extend(recorded.iter().flat_map(AddedBlock::texts));
        let mut block = AddedBlock::added(&spec.name, texts, node, cdi);
        recorded.iter().filter(|_| plan.replaces).for_each(|old| block.replaces(old, node));
        plan.block = Some(block);
    }
    plan.restarts = true;
    plan.edit = Some(edit);
    Ok(plan)
}

/// Plans the removal of every handler of a record. If no containerd runs, the plan edits the files
/// that are in the record.
pub fn uninstall(
    options: &InstallOptions,
    record: &InstallRecord,
    node: Option<&ContainerdNode>,
) -> Result<HandlerPlan, EditError> {
    let spec = |block: &AddedBlock| {
        HandlerSpec::new(&block.runtime_name, &options.prefix, Some(record), false)
    };
    let gone: Vec<HandlerSpec> = record.blocks().map(spec).collect();
    let mut edit = ConfigEdit::of(files(None, node, Some(record)))?;
    record.blocks().flat_map(AddedBlock::texts).for_each(|text| edit.remove_text(&text));
    let dump = node.and_then(|node| node.config().ok());
    edit.remove_handlers(&gone, &dump.map(|dump| merged(&gone, &dump)).unwrap_or_default())?;
    let edit = Some(edit).filter(|edit| !edit.is_empty());
    Ok(HandlerPlan {
        restarts: edit.is_some(),
        edit,
        wanted: None,
        replaces: false,
        gone,
        block: None,
        former: Vec::new(),
        adopted: None,
    })
}

/// Returns whether containers get their devices from CDI. After a start of the machine, CDI
/// specifications may still be missing. The result is therefore also true if the record states that
/// CDI was used and CDI is turned on in containerd.
pub fn uses_cdi(record: Option<&InstallRecord>, node: &ContainerdNode, dump: &Table) -> bool {
    let known = record.and_then(|record| record.block.as_ref()).is_some_and(|block| block.cdi);
    cdi::injects(dump, &node.files()) || known && cdi::is_enabled(dump)
}

/// Returns the names of the handlers that belong to this installation, according to containerd's
/// whole configuration.
fn merged<'a>(specs: &'a [HandlerSpec], dump: &Table) -> Vec<&'a str> {
    let ours = |spec: &&HandlerSpec| {
        matches!(spec.judge(dump), HandlerVerdict::Same | HandlerVerdict::Differs)
    };
    specs.iter().filter(ours).map(|spec| spec.name.as_str()).collect()
}

/// Returns the files that may contain a handler: the target, the files that containerd reads, and
/// the files in the record. The file that k3s and rke2 render is left out.
fn files(
    target: Option<&InstallTarget>,
    node: Option<&ContainerdNode>,
    record: Option<&InstallRecord>,
) -> Vec<PathBuf> {
    let blocks = || record.into_iter().flat_map(InstallRecord::blocks);
    let read = match node {
        Some(node) => node.files(),
        None => {
            blocks().filter_map(|b| b.root.as_deref()).flat_map(|r| imports::of(r).files).collect()
        }
    };
    let recorded = blocks().flat_map(|block| block.texts()).map(|text| text.path);
    let first = target.map(|target| target.path().to_owned());
    let all = first.into_iter().chain(read).chain(recorded);
    all.filter(|path| !path.ends_with(target::RENDERED)).collect()
}

/// Adds the wanted handler to the target file. With containerd 1.x, the target may be an imported
/// file that NVIDIA's toolkit creates from containerd's own file. Its sections replace those of
/// containerd's own file. If containerd's own file contains handlers, the handler is added to both
/// files.
fn add(
    edit: &mut ConfigEdit,
    target: &InstallTarget,
    node: &ContainerdNode,
    dump: &Table,
    spec: &HandlerSpec,
) -> Result<Vec<AddedText>, EditError> {
    let file = node.config_file();
    let root = if edit.text(&file).is_some() { edit.table(&file) } else { node.root() };
    let path = target.path();
    let own = if let InstallTarget::Root(path) = target { edit.table(path) } else { root.clone() };
    let there = edit.text(path).is_some();
    let version = match target {
        // A file that does not exist gets the configuration version of the dump.
        InstallTarget::Root(_) if !there => {
            dump.get("version").and_then(Value::as_integer).unwrap_or(2)
        }
        InstallTarget::Root(_) => handler::version(&own),
        // containerd does not merge a section of version 2 with a section of version 3. NVIDIA's
        // toolkit writes version 3 even if containerd's own file has version 2.
        InstallTarget::DropIn(_) => {
            let others = node.files().into_iter().map(|file| handler::version(&edit.table(&file)));
            others.fold(handler::version(&root), i64::max).min(handler::version(dump))
        }
        InstallTarget::Template(_) => handler::version(&root),
    };
    let block = block::text(dump, &own, version, spec)?;
    let text = match (target, edit.text(path)) {
        (InstallTarget::Template(_), None) => format!("{BASE}\n\n{block}"),
        (_, None) => format!("version = {version}\n\n{block}"),
        (_, Some(before)) => apart(before, &block),
    };
    let mut added = vec![AddedText { path: path.to_owned(), text, created: !there }];
    let names = handler::cri_of(&root, PLUGINS[0]).is_some_and(|cri| cri.contains_key("runtimes"));
    if matches!(target, InstallTarget::Root(_)) && path != file && names {
        let block = block::text(dump, &root, handler::version(&root), spec)?;
        let text = apart(edit.text(&file).unwrap_or_default(), &block);
        added.push(AddedText { path: file, text, created: false });
    }
    added.iter().for_each(|added| edit.append(&added.path, &added.text));
    Ok(added)
}

/// Returns the block with an empty line in front of it, which separates it from the text `before`.
fn apart(before: &str, block: &str) -> String {
    if before.ends_with('\n') { format!("\n{block}") } else { format!("\n\n{block}") }
}

/// Returns the time at which a file was last written. If the file does not exist, returns the begin
/// of 1970.
pub fn written(path: &Path) -> SystemTime {
    let written = fs::metadata(path).and_then(|file| file.modified());
    written.unwrap_or(UNIX_EPOCH)
}
