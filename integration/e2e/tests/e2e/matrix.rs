//! Defines tests that run with every containerd release of the machine.

use affinode_e2e::{
    artifacts::Artifacts,
    release::{Line, Releases},
    testbed::{Testbed, TestbedConfig},
};
use anyhow::Result;

/// Creates a testbed with a containerd of this release line. `None` if the machine cannot have such
/// a containerd. In this case `cargo xtask deps` has printed the reason.
pub fn world(line: Line, recipe: TestbedConfig) -> Result<Option<Testbed>> {
    let releases = Releases::read(&Artifacts::find()?)?;
    match releases.get(line)? {
        Some(release) => recipe.release(release).world().map(Some),
        None => {
            let why = format!("no containerd {} on this machine", line.as_str());
            affinode_test_notes::skip("containerd-line", &why);
            Ok(None)
        }
    }
}

/// Defines a test for each function `fn(&Testbed) -> Result<()>` and each release line of
/// containerd.
macro_rules! on_every_containerd {
    ($recipe:expr; $($case:ident),* $(,)?) => {
        on_every_containerd!(@line containerd_1_6, V1_6, $recipe; $($case),*);
        on_every_containerd!(@line containerd_1_7, V1_7, $recipe; $($case),*);
        on_every_containerd!(@line containerd_2, V2, $recipe; $($case),*);
    };
    (@line $module:ident, $line:ident, $recipe:expr; $($case:ident),*) => {
        mod $module {
            #[allow(unused_imports, reason = "the recipe may use any of its maker's names")]
            use super::*;
            $(
                #[test]
                fn $case() -> anyhow::Result<()> {
                    let line = affinode_e2e::release::Line::$line;
                    match crate::matrix::world(line, $recipe)? {
                        Some(world) => super::$case(&world).inspect_err(|_| world.show_logs()),
                        None => Ok(()),
                    }
                }
            )*
        }
    };
}
pub(crate) use on_every_containerd;
