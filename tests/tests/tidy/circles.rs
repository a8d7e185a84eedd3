//! No two files of a crate import each other, be it by way of others: each can be read and tested
//! with what is below it alone, and there is an order in which to read them.
//!
//! A file and those in its folder (`mem/mod.rs` and `mem/pool.rs`) are one thing in pieces: what
//! they import of each other does not count. What is imported by a name that a file has from
//! elsewhere (`super::Name`, where the file above says `pub use other::Name`) counts as that of the
//! file that it comes from; names that come with a `*` count as those of the file that has it.

use super::source::{Source, Violation, mark_tests, report, sources};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The files of one crate, by the names that lead to their modules.
type Files<'a> = BTreeMap<Vec<String>, &'a Source>;

/// What a file imports of another.
#[derive(Default)]
struct Import {
    /// Where it first does, counted from 0.
    line: usize,
    names: BTreeSet<String>,
}

/// What each file imports of which others, by their modules.
type Imports<'a> = BTreeMap<&'a [String], BTreeMap<&'a [String], Import>>;

/// The library and the programs of each crate, by their root folders. Tests are no part of them.
fn crates(sources: &[Source]) -> BTreeMap<&str, Files<'_>> {
    let mut crates: BTreeMap<&str, Files<'_>> = BTreeMap::new();
    for source in sources {
        let Some((root, module)) = source.module() else { continue };
        let is_test = module.iter().any(|name| name == "tests" || name.ends_with("_tests"));
        if !is_test {
            crates.entry(root).or_default().insert(module, source);
        }
    }
    crates
}

/// For each file, where the names come from that it has from other files.
type Origins<'a> = BTreeMap<&'a [String], BTreeMap<String, Vec<String>>>;

fn origins<'a>(files: &'a Files<'a>) -> Origins<'a> {
    let mut origins = Origins::new();
    for (module, source) in files {
        let names: &mut BTreeMap<String, Vec<String>> = origins.entry(module).or_default();
        for path in source.used_paths(|name| files.contains_key(&within(module, name))) {
            if let Some(name) = path.last().filter(|name| *name != "*") {
                names.insert(name.clone(), path);
            }
        }
    }
    origins
}

fn within(module: &[String], name: &str) -> Vec<String> {
    module.iter().cloned().chain([name.to_owned()]).collect()
}

/// The file that a path leads to, and the path without detours by files that only pass a name on.
fn resolve<'a>(
    files: &'a Files<'a>,
    origins: &Origins<'a>,
    mut path: Vec<String>,
) -> Option<(&'a [String], Vec<String>)> {
    // Two files may give each other a name that neither has, which the compiler refuses.
    for _ in 0..files.len() {
        let mut lengths = (0..=path.len()).rev();
        let (module, _) = lengths.find_map(|length| files.get_key_value(&path[..length]))?;
        let name = path.get(module.len());
        match name.and_then(|name| origins.get(module.as_slice())?.get(name)) {
            Some(origin) if origin[..] != path[..=module.len()] => {
                path = origin.iter().chain(&path[module.len() + 1..]).cloned().collect();
            }
            _ => return Some((module, path)),
        }
    }
    None
}

/// Whether one of two modules is the other, or within it.
fn is_one(a: &[String], b: &[String]) -> bool {
    a.starts_with(b) || b.starts_with(a)
}

fn imports<'a>(files: &'a Files<'a>) -> Imports<'a> {
    let (mut imports, origins) = (Imports::new(), origins(files));
    for (module, source) in files {
        let test = mark_tests(&source.code);
        let from: &mut BTreeMap<&[String], Import> = imports.entry(module).or_default();
        for (line, path) in source.own_paths() {
            let Some((other, path)) = resolve(files, &origins, path) else { continue };
            if test[line] || is_one(module, other) {
                continue;
            }
            let import = from.entry(other).or_insert_with(|| Import { line, ..Import::default() });
            let name = path.get(other.len()).or(path.last()).map_or("", String::as_str);
            import.names.insert(format!("`{name}`"));
        }
    }
    imports
}

/// The shortest way along imports from one file to another, with both ends.
fn way<'a>(imports: &Imports<'a>, from: &'a [String], to: &[String]) -> Option<Vec<&'a [String]>> {
    let mut before = BTreeMap::from([(from, None)]);
    let mut queue = VecDeque::from([from]);
    while let Some(at) = queue.pop_front() {
        if at == to {
            let back = std::iter::successors(Some(at), |at| before.get(at).copied().flatten());
            let mut way: Vec<_> = back.collect();
            way.reverse();
            return Some(way);
        }
        for &next in imports.get(at).into_iter().flat_map(BTreeMap::keys) {
            before.entry(next).or_insert_with(|| {
                queue.push_back(next);
                Some(at)
            });
        }
    }
    None
}

/// Every import that is part of a circle, with the shortest way back.
fn circles(sources: &[Source]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for files in crates(sources).values() {
        let imports = imports(files);
        for (&module, others) in &imports {
            for (&other, import) in others {
                let Some(way) = way(&imports, other, module) else { continue };
                let names: Vec<&str> = import.names.iter().map(String::as_str).collect();
                let steps: Vec<String> =
                    way.iter().map(|&step| format!("`{}`", files[step].path)).collect();
                let message = format!(
                    "circles: imports {} of {}, from which imports lead back ({}): move what both \
                     need into a file below them, or what one alone needs into that one",
                    names.join(", "),
                    steps[0],
                    steps.join(" to ")
                );
                violations.push(files[module].violation(import.line, message));
            }
        }
    }
    violations
}

#[test]
fn no_files_import_each_other() {
    let sources = sources();
    let found = crates(&sources);
    for root in ["engine", "server", "worker", "worker/launch", "python", "perf", "tests"] {
        let count = found.get(format!("{root}/src").as_str()).map_or(0, BTreeMap::len);
        assert!(count > 1, "only {count} files of `{root}` are found: is the root right?");
    }
    report(&circles(&sources));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found where files have these texts.
    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<Source> =
            files.iter().map(|(path, text)| Source::new((*path).into(), text)).collect();
        let line = |one: Violation| format!("{}:{}: {}", one.path, one.line, one.message);
        circles(&sources).into_iter().map(line).collect()
    }

    #[test]
    fn a_circle_is_found_with_what_is_imported_and_the_way_back() {
        let files = [
            ("server/src/lib.rs", "mod a;\nmod b;\n"),
            ("server/src/a.rs", "//! A.\n\nuse super::b::{Bird, self};\nuse crate::b::c::Cat;\n"),
            ("server/src/b.rs", "mod c;\nmod d;\n"),
            ("server/src/b/c.rs", "fn f() -> super::d::Dog { g() }\n"),
            ("server/src/b/d.rs", "use crate::{a::{Ape as Monkey}, std::x};\n"),
        ];
        let lines = found(&files);
        let expected = [
            "server/src/a.rs:4: circles: imports `Cat` of `server/src/b/c.rs`, from which imports \
             lead back (`server/src/b/c.rs` to `server/src/b/d.rs` to `server/src/a.rs`)",
            "server/src/b/c.rs:1: circles: imports `Dog` of `server/src/b/d.rs`, from which \
             imports lead back (`server/src/b/d.rs` to `server/src/a.rs` to `server/src/b/c.rs`)",
            "server/src/b/d.rs:1: circles: imports `Ape` of `server/src/a.rs`, from which imports \
             lead back (`server/src/a.rs` to `server/src/b/c.rs` to `server/src/b/d.rs`)",
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:?}");
        for (line, expected) in lines.iter().zip(expected) {
            assert!(line.starts_with(expected), "{line}");
        }
    }

    #[test]
    fn two_files_that_import_each_other_are_both_named() {
        let mutual = |a: &str, b: &str| {
            found(&[("tests/src/x/a.rs", a), ("tests/src/x/b.rs", b), ("tests/src/x.rs", "")])
        };
        let (to_a, to_b) = ("use super::a::A;\n", "use crate::x::b::*;\n");
        let lines = mutual(to_b, to_a);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("tests/src/x/a.rs:1: circles: imports `b` of"), "{lines:?}");
        assert!(lines[1].starts_with("tests/src/x/b.rs:1: circles: imports `A` of"), "{lines:?}");
        let in_test = format!("#[cfg(test)]\nmod tests {{\n    {to_a}}}\n");
        for harmless in ["", "// use super::a::A;\n", "use super::A;\n", "use std::a::A;\n"] {
            assert_eq!(mutual(to_b, harmless), [""; 0], "{harmless}");
        }
        assert_eq!(mutual(to_b, &in_test), [""; 0]);
        // Two programs are two crates, and what one is called says nothing of the other.
        let apart = [("perf/src/bin/p/a.rs", to_b), ("perf/src/bin/q/b.rs", to_a)];
        assert_eq!(found(&apart), [""; 0]);
    }

    #[test]
    fn a_name_that_is_passed_on_is_imported_from_where_it_comes() {
        let through = |above: &str, a: &str| {
            let b = "use super::a::A;\n";
            found(&[("tests/src/x/a.rs", a), ("tests/src/x/b.rs", b), ("tests/src/x.rs", above)])
        };
        let takes = "use super::{B, Own};\n";
        for above in [
            "mod a;\nmod b;\npub use b::B;\n",
            "mod a;\nmod b;\npub(crate) use self::b::{B, C};\n",
            "mod a;\nmod b;\nuse crate::x::b::B;\n",
        ] {
            let lines = through(above, takes);
            assert_eq!(lines.len(), 2, "{above}: {lines:?}");
            assert!(
                lines[0].starts_with("tests/src/x/a.rs:1: circles: imports `B` of"),
                "{lines:?}"
            );
        }
        let passes = "mod a;\nmod b;\npub use b::B;\npub use a::A;\n";
        // What the file above has itself, or from the one that imports it, or from another crate.
        for harmless in ["use super::Own;\n", "use super::A;\n", "use b::B;\n"] {
            assert_eq!(through(passes, harmless), [""; 0], "{harmless}");
        }
        assert_eq!(through("pub use b::B;\npub use std::B;\n", "use super::X;\n"), [""; 0]);
    }

    #[test]
    fn a_file_and_those_in_its_folder_are_one_thing() {
        let files = [
            ("engine/src/lib.rs", "pub mod mem;\npub use crate::mem::pool::cell::Cell;\n"),
            ("engine/src/mem/mod.rs", "use self::pool::Pool;\nuse crate::mem::pool::cell::C;\n"),
            ("engine/src/mem/pool.rs", "use super::Arena;\nuse crate::mem::pool::cell::Cell;\n"),
            ("engine/src/mem/pool/cell.rs", "use super::Pool;\nuse super::super::Arena;\n"),
            ("engine/src/mem/pool/tests.rs", "use crate::mem::pool::cell::Cell;\n"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }
}
