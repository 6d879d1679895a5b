//! The memory adapter at a million keys, beside `moka`: `cargo bench --bench memory`, under a
//! minute. `measure/memory.rs` describes the measurement.
//!
//! Under `cargo test` it does nothing: `tests/stores/memory.rs` counts bytes and allocations.

use shared::ratios::{heading, report};
use shared::run::Run;

#[path = "measure/memory.rs"]
mod memory;
#[path = "shared/mod.rs"]
mod shared;

const NAMES: [&str; 3] = ["memory_insert_ns", "memory_over_moka", "memory_bytes"];

fn main() {
    let run = Run::from_args();
    if run.is_test() || !run.wants(&NAMES) {
        return;
    }
    let keys = 1_000_000;
    heading(&run, &format!("{keys} new keys in memory, one thread"));
    for (name, value) in memory::measure(keys) {
        if NAMES.contains(&name.as_str()) {
            report(&run, &name, &[value], "a key");
        } else {
            println!("  {name:<28} {value:>10.2}");
        }
    }
}
