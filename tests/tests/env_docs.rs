//! `docs/env.md` says what the table of knobs says. `BPS_BLESS=1` writes it anew.

use std::path::Path;

#[test]
fn env_md_is_what_the_table_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/env.md");
    let wanted = bps_engine::config::document();
    if std::env::var_os("BPS_BLESS").is_some() {
        std::fs::write(&path, &wanted).expect("docs/env.md is writable");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let differing = found.lines().zip(wanted.lines()).find(|(found, wanted)| found != wanted);
    assert!(
        found == wanted,
        "docs/env.md differs from the table in engine/src/config/table; run \
         `BPS_BLESS=1 cargo test -p bps-tests --test env_docs`. First difference: {differing:?}"
    );
}
