//! Loaded modules, and the kernels that were looked up in them.

use std::collections::BTreeMap;

use crate::abi::{Handle, INVALID_HANDLE, Kind, NOT_FOUND, Outcome, handle, number};
use crate::kernels::Kernel;

#[derive(Debug, Default)]
pub struct Modules {
    /// Kernel names in each module's PTX text. `None` for an image in another format, in which
    /// every kernel name is accepted.
    modules: BTreeMap<u64, Option<Vec<String>>>,
    functions: BTreeMap<u64, (u64, Kernel)>,
    next: u64,
}

impl Modules {
    /// Simulates the function `cuModuleLoadData`.
    pub fn load(&mut self, entries: Option<Vec<String>>) -> Handle {
        self.next += 1;
        self.modules.insert(self.next, entries);
        handle(Kind::Module, self.next)
    }

    /// Simulates the function `cuModuleUnload`.
    pub fn unload(&mut self, module: Handle) -> Outcome {
        let id = number(Kind::Module, module)?;
        self.modules.remove(&id).ok_or(INVALID_HANDLE)?;
        self.functions.retain(|_, (of, _)| *of != id);
        Ok(())
    }

    /// Returns an error if a handle does not name an existing module.
    pub fn check(&self, module: Handle) -> Outcome {
        let id = number(Kind::Module, module)?;
        if self.modules.contains_key(&id) { Ok(()) } else { Err(INVALID_HANDLE) }
    }

    /// Simulates the function `cuModuleGetFunction`.
    pub fn function(&mut self, module: Handle, name: &str) -> Outcome<Handle> {
        let id = number(Kind::Module, module)?;
        let entries = self.modules.get(&id).ok_or(INVALID_HANDLE)?;
        if entries.as_ref().is_some_and(|entries| !entries.iter().any(|entry| entry == name)) {
            return Err(NOT_FOUND);
        }
        let kernel = Kernel::named(name)?;
        let known = self
            .functions
            .iter()
            .find(|(_, function)| **function == (id, kernel))
            .map(|(number, _)| *number);
        let function = known.unwrap_or_else(|| {
            self.next += 1;
            self.functions.insert(self.next, (id, kernel));
            self.next
        });
        Ok(handle(Kind::Function, function))
    }

    /// Returns the kernel to which a function handle refers.
    pub fn kernel(&self, function: Handle) -> Outcome<Kernel> {
        let id = number(Kind::Function, function)?;
        self.functions.get(&id).map(|(_, kernel)| *kernel).ok_or(INVALID_HANDLE)
    }
}
