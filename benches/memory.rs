//! The memory adapter at a million keys, beside `moka`: `cargo bench --bench memory`, under a
//! minute. What is measured, and how, is said in `measure/memory.rs`.
#![expect(clippy::expect_used, reason = "what fails here is not measured")]

#[path = "measure/memory.rs"]
mod memory;

const KEYS: usize = 1_000_000;

const GOALS: &[(&str, &str)] = &[
    ("memory_insert_ns", "at most 200"),
    ("memory_over_moka", "at least 5"),
    ("memory_bytes", "at most 64"),
];

fn main() {
    println!("{KEYS} keys");
    for (name, value) in memory::measure(KEYS) {
        let goal = GOALS.iter().find(|(of, _)| *of == name);
        let goal = goal.map(|(_, goal)| format!("   goal: {goal}")).unwrap_or_default();
        println!("{name:<28} {value:>10.2}{goal}");
    }
}
