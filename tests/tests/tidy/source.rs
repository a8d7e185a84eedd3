//! Rust files as the tidy rules see them: code apart from comments and literals, tests apart from
//! the rest.
//!
//! This is no parser. It knows comments, literals and braces, which is enough for the rules here
//! and keeps them free of a compiler's version. A file must be formatted by rustfmt.

use std::path::{Path, PathBuf};

/// One Rust file.
pub struct Source {
    /// Path from the repository's root, with forward slashes.
    pub path: String,
    /// The lines as they are.
    pub text: Vec<String>,
    /// The same lines with comments removed and literals emptied.
    pub code: Vec<String>,
    /// The same lines with nothing but their comments.
    pub comment: Vec<String>,
    /// Whether a line belongs to a test.
    pub test: Vec<bool>,
}

/// A rule that a line breaks.
pub struct Violation {
    /// Path from the repository's root.
    pub path: String,
    /// Counted from 1; 0 is the whole file.
    pub line: usize,
    /// The rule, and what to do about it.
    pub message: String,
}

/// The repository's root folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the crate has a parent")
}

/// Folders that hold what tools made, not what people wrote.
const BUILT: [&str; 9] =
    ["target", ".git", ".venv", ".cache", "__pycache__", "node_modules", "build", "dist", "corpus"];

/// All files below `folder` whose name ends in `suffix`, sorted, as paths from the root.
pub fn files(folder: &str, suffix: &str) -> Vec<String> {
    fn walk(root: &Path, folder: &Path, suffix: &str, found: &mut Vec<String>) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if !BUILT.contains(&name.as_str()) && !name.ends_with(".egg-info") {
                    walk(root, &path, suffix, found);
                }
            } else if name.ends_with(suffix) {
                let relative = path.strip_prefix(root).expect("it was found below the root");
                found.push(relative.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    let root = root();
    let mut found = Vec::new();
    walk(&root, &root.join(folder), suffix, &mut found);
    found.sort();
    found
}

/// Every Rust file of the repository.
pub fn sources() -> Vec<Source> {
    let sources: Vec<Source> = files("", ".rs")
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(root().join(&path)).expect("a Rust file is UTF-8");
            Source::new(path, &text)
        })
        .collect();
    assert!(sources.len() > 20, "only {} Rust files found: is the root right?", sources.len());
    sources
}

/// Fails with everything that was found.
pub fn report(violations: &[Violation]) {
    let lines: Vec<String> = violations
        .iter()
        .map(|found| format!("{}:{}: {}", found.path, found.line, found.message))
        .collect();
    assert!(lines.is_empty(), "{} found:\n{}", lines.len(), lines.join("\n"));
}

impl Source {
    /// Takes a file apart.
    pub fn new(path: String, text: &str) -> Source {
        let (code, comment) = split(text);
        let lines = |text: &str| text.split('\n').map(str::to_owned).collect::<Vec<_>>();
        let (text, code, comment) = (lines(text.trim_end()), lines(&code), lines(&comment));
        let name = path.rsplit('/').next().unwrap_or(&path);
        let whole =
            path.starts_with("tests/") || path.contains("/tests/") || name.ends_with("tests.rs");
        let test = if whole { vec![true; code.len()] } else { mark_tests(&code) };
        Source { path, text, code, comment, test }
    }

    /// A violation in this file; `line` counts from 0.
    pub fn violation(&self, line: usize, message: impl Into<String>) -> Violation {
        Violation { path: self.path.clone(), line: line + 1, message: message.into() }
    }

    /// Every place where `path` (such as `std::env::var`) is written in code, as line (from 0) and
    /// the column just after it. Longer names that contain it do not count.
    pub fn places(&self, path: &str) -> Vec<(usize, usize)> {
        let mut places = Vec::new();
        for (line, code) in self.code.iter().enumerate() {
            places.extend(words(code, path).map(|at| (line, at + path.len())));
        }
        places
    }

    /// The root of the crate that this file belongs to, and the names that lead from there to its
    /// module: `engine/src` and `mem`, `pool` for `mem/pool.rs`, `mem` alone for `mem/mod.rs`. A
    /// program below `src/bin` is a crate of its own.
    pub fn module(&self) -> Option<(&str, Vec<String>)> {
        let start = self.path.find("/src/")? + "/src".len();
        let program = self.path[start..].strip_prefix("/bin/").map(|rest| rest.find('/'));
        let start = match program {
            Some(length) => start + "/bin/".len() + length?,
            None => start,
        };
        let (root, inner) = self.path.split_at(start);
        let names = inner.split('/').map(|name| name.strip_suffix(".rs").unwrap_or(name));
        let names = names.filter(|name| !matches!(*name, "" | "mod" | "lib" | "main"));
        Some((root, names.map(str::to_owned).collect()))
    }

    /// Every path into its own crate that a file names (by `crate::`, `super::` or `self::`), as
    /// line (from 0) and the names that lead there from the crate's root. Paths to its own children
    /// that begin with their names are not here.
    pub fn own_paths(&self) -> Vec<(usize, Vec<String>)> {
        let Some((_, module)) = self.module() else { return Vec::new() };
        let code = self.code.join("\n");
        let leads = ["crate::", "super::", "self::"].map(|lead| words(&code, lead));
        let mut places: Vec<usize> = leads.into_iter().flatten().collect();
        places.sort_unstable();
        let (mut found, mut read, mut line, mut counted) = (Vec::new(), 0, 0, 0);
        for at in places {
            // The others in `super::super::a` and `super::{super::a, b}` are read with the first.
            if at < read {
                continue;
            }
            line += code[counted..at].matches('\n').count();
            counted = at;
            let mut paths = Vec::new();
            read = code.len() - take_paths(&code[at..], &[], &mut paths).len();
            found.extend(paths.iter().filter_map(|path| Some((line, from_root(&module, path)?))));
        }
        found
    }

    /// Every path of this crate in a `use` of this file, from the crate's root. One may begin with
    /// a module of this one, which `is_child` tells by its name. A name after `as` is not seen.
    pub fn used_paths(&self, is_child: impl Fn(&str) -> bool) -> Vec<Vec<String>> {
        let Some((_, module)) = self.module() else { return Vec::new() };
        let mut found = Vec::new();
        for (line, column) in self.places("use") {
            let rest = self.rest(line, column);
            let statement = rest.split(';').next().unwrap_or_default();
            let mut paths = Vec::new();
            take_paths(statement.trim_start(), &[], &mut paths);
            found.extend(paths.iter().filter_map(|path| {
                let first = path.first()?.as_str();
                let is_own = matches!(first, "crate" | "super" | "self") || is_child(first);
                is_own.then(|| from_root(&module, path))?
            }));
        }
        found
    }

    /// The code from a place on, to the end of the file, on one line.
    pub fn rest(&self, line: usize, column: usize) -> String {
        let mut rest = self.code[line][column..].to_owned();
        for code in &self.code[line + 1..] {
            rest.push(' ');
            rest.push_str(code);
            if rest.len() > 4000 {
                break;
            }
        }
        rest
    }

    /// Name, first line and last line (from 0) of each function that has a body.
    pub fn functions(&self) -> Vec<(String, usize, usize)> {
        let mut functions = Vec::new();
        for (line, column) in self.places("fn") {
            let rest = self.code[line][column..].trim_start();
            let name: String = rest.chars().take_while(|c| is_word(*c)).collect();
            if name.is_empty() {
                continue; // A function pointer's type.
            }
            if let Some(end) = body_end(&self.code, line, column) {
                functions.push((name, line, end));
            }
        }
        functions
    }
}

/// The names that lead from the crate's root to what a file of this module calls so; none if they
/// lead out of the crate.
fn from_root(module: &[String], path: &[String]) -> Option<Vec<String>> {
    let mut names = module.to_vec();
    for name in path {
        match name.as_str() {
            "crate" => names.clear(),
            "super" => drop(names.pop()?),
            "self" => {}
            _ => names.push(name.clone()),
        }
    }
    Some(names)
}

/// The first names of what follows `crate::` or the like: one, or those of a group in braces.
pub fn first_names(rest: &str) -> Vec<String> {
    let mut paths = Vec::new();
    take_paths(rest, &[], &mut paths);
    let mut names: Vec<String> = paths.into_iter().filter_map(|it| it.into_iter().next()).collect();
    names.dedup();
    names
}

/// Reads a path, or a group of them in braces, behind these names, and returns what follows it.
/// Each path comes as its names; that of `a::*` is `a`.
fn take_paths<'a>(rest: &'a str, before: &[String], paths: &mut Vec<Vec<String>>) -> &'a str {
    let rest = rest.trim_start();
    if let Some(mut group) = rest.strip_prefix('{') {
        loop {
            group = group.trim_start();
            if group.is_empty() || group.starts_with('}') {
                return group.strip_prefix('}').unwrap_or(group);
            }
            let after = take_paths(group, before, paths);
            // What it is renamed to matters to nobody.
            let end = after.find([',', '}']).unwrap_or(after.len());
            group = after[end..].strip_prefix(',').unwrap_or(&after[end..]);
        }
    }
    let (name, after) = rest.split_at(rest.find(|c| !is_word(c)).unwrap_or(rest.len()));
    let mut path = before.to_vec();
    path.extend(Some(name.to_owned()).filter(|name| !name.is_empty()));
    match after.strip_prefix("::") {
        Some(deeper) if deeper.starts_with(|c| is_word(c) || c == '{' || c == '*') => {
            take_paths(deeper, &path, paths)
        }
        _ => {
            paths.push(path);
            after
        }
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Where `path` stands in `code` as whole words.
pub fn words<'a>(code: &'a str, path: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(path).map(|(at, _)| at).filter(move |&at| {
        let before = code[..at].chars().next_back();
        let after = code[at + path.len()..].chars().next();
        !(before.is_some_and(is_word) || path.ends_with(is_word) && after.is_some_and(is_word))
    })
}

/// The line of the brace that closes the first one after this place; none if `;` comes first.
fn body_end(code: &[String], line: usize, column: usize) -> Option<usize> {
    let (mut depth, mut round) = (0_usize, 0_usize);
    for (at, text) in code.iter().enumerate().skip(line) {
        let text = if at == line { &text[column..] } else { text };
        for c in text.chars() {
            match c {
                '(' | '[' => round += 1,
                ')' | ']' => round = round.saturating_sub(1),
                '{' => depth += 1,
                ';' if depth == 0 && round == 0 => return None,
                '}' => {
                    depth = depth.checked_sub(1)?;
                    if depth == 0 {
                        return Some(at);
                    }
                }
                _ => {}
            }
        }
    }
    None
}

/// Marks what `#[cfg(test)]` and `#[cfg(all(test, …))]` apply to.
pub fn mark_tests(code: &[String]) -> Vec<bool> {
    let mut test = vec![false; code.len()];
    for line in 0..code.len() {
        let text = code[line].trim_start();
        if text.starts_with("#[cfg(test)]") || text.starts_with("#[cfg(all(test") {
            let end = body_end(code, line, 0).unwrap_or(line + 1).min(code.len() - 1);
            test[line..=end].fill(true);
        }
    }
    test
}

/// Code and comments of a text, each with the text's line breaks.
fn split(text: &str) -> (String, String) {
    let characters: Vec<char> = text.chars().collect();
    let (mut code, mut comment) = (String::new(), String::new());
    let at = |index: usize| characters.get(index).copied().unwrap_or('\0');
    let mut index = 0;
    while index < characters.len() {
        let end = match (at(index), at(index + 1)) {
            ('/', '/') => end_of_line(&characters, index),
            ('/', '*') => end_of_block(&characters, index),
            ('"', _) => end_of_string(&characters, index + 1),
            ('r', '"' | '#') if !is_word(at(index.wrapping_sub(1))) || at(index - 1) == 'b' => {
                end_of_raw(&characters, index)
            }
            ('\'', '\\') => end_of_char(&characters, index + 2),
            ('\'', _) if at(index + 2) == '\'' => index + 3,
            _ => index + 1,
        };
        let is_comment = at(index) == '/' && matches!(at(index + 1), '/' | '*');
        let is_literal = end > index + 1 && !is_comment;
        for &c in &characters[index..end] {
            match c {
                '\n' => {
                    code.push('\n');
                    comment.push('\n');
                }
                c if is_comment => comment.push(c),
                _ if is_literal => {}
                c => code.push(c),
            }
        }
        if is_literal {
            code.push_str("\"\"");
        }
        index = end;
    }
    (code, comment)
}

fn end_of_line(characters: &[char], from: usize) -> usize {
    characters[from..].iter().position(|c| *c == '\n').map_or(characters.len(), |n| from + n)
}

fn end_of_block(characters: &[char], from: usize) -> usize {
    let (mut depth, mut index) = (0, from);
    while index < characters.len() {
        match characters[index..] {
            ['/', '*', ..] => (depth, index) = (depth + 1, index + 2),
            ['*', '/', ..] => (depth, index) = (depth - 1, index + 2),
            _ => index += 1,
        }
        if depth == 0 {
            break;
        }
    }
    index
}

fn end_of_string(characters: &[char], from: usize) -> usize {
    let mut index = from;
    while index < characters.len() {
        match characters[index] {
            '\\' => index += 2,
            '"' => return index + 1,
            _ => index += 1,
        }
    }
    characters.len()
}

fn end_of_raw(characters: &[char], from: usize) -> usize {
    let hashes = characters[from + 1..].iter().take_while(|c| **c == '#').count();
    let mut index = from + 1 + hashes;
    if characters.get(index) != Some(&'"') {
        return from + 1; // A raw identifier.
    }
    index += 1;
    while index < characters.len() {
        let closes = characters[index] == '"'
            && characters[index + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
        index += 1;
        if closes {
            return index + hashes;
        }
    }
    characters.len()
}

fn end_of_char(characters: &[char], from: usize) -> usize {
    let escaped = from + 1;
    characters[escaped..].iter().position(|c| *c == '\'').map_or(from, |n| escaped + n + 1)
}

#[test]
fn code_and_comments_are_told_apart() {
    let text = concat!(
        "//! Owns.\nfn a<'x>(s: &'x str) { // why\n    let c = '\\'';\n",
        "    b(\"{ // \\\" no\", '{');\n}\n",
        "#[cfg(test)]\nmod tests {\n    fn t() { r#\"}\"#; /* } /* } */ */ }\n}\n",
        "use crate::{base::{A, B}, wire, x::*};\n",
    );
    let source = Source::new("engine/src/x.rs".into(), text);
    let functions = source.functions();
    assert_eq!(functions, [("a".to_owned(), 1, 4), ("t".to_owned(), 7, 7)]);
    assert_eq!(source.comment[1], "// why");
    assert_eq!(source.test[4..10], [false, true, true, true, true, false]);
    let (line, column) = source.places("crate::")[0];
    assert_eq!(first_names(&source.rest(line, column)), ["base", "wire", "x"]);
}

#[test]
fn paths_lead_from_the_root() {
    let text = concat!(
        "use super::{super::wire::{self, Header as H}, pool::*};\n",
        "use crate::base::{\n    Key, // super::no\n    Rank,\n};\nuse std::fmt;\n",
        "fn a() -> super::super::X { self::child::b::<crate::c::D>(super::e) }\n",
    );
    let source = Source::new("engine/src/mem/arena.rs".into(), text);
    let paths: Vec<_> =
        source.own_paths().into_iter().map(|(line, path)| (line, path.join("::"))).collect();
    let expected = [
        (0, "wire"),
        (0, "wire::Header"),
        (0, "mem::pool"),
        (1, "base::Key"),
        (1, "base::Rank"),
        (6, "X"),
        (6, "mem::arena::child::b"),
        (6, "c::D"),
        (6, "mem::e"),
    ];
    assert_eq!(paths, expected.map(|(line, path)| (line, path.to_owned())));
    let module = |path: &str| {
        let source = Source::new(path.into(), "");
        source.module().map(|(root, names)| format!("{root} {}", names.join("::")))
    };
    let cases = [
        ("engine/src/mem/mod.rs", Some("engine/src mem")),
        ("worker/launch/src/lib.rs", Some("worker/launch/src ")),
        ("tests/src/bin/rank/ahead.rs", Some("tests/src/bin/rank ahead")),
        ("server/src/bin/top.rs", None),
        ("engine/tests/log.rs", None),
    ];
    for (path, expected) in cases {
        assert_eq!(module(path).as_deref(), expected, "{path}");
    }
}
