//! `bps_worker::cuda` against the stand-in for libcuda and libnccl, in child processes: what is
//! missing is said, copies and collectives are right and in order, and what fails is an error in
//! time.

use bps_fake_gpu as _;
use bps_tests::fake_gpu;
use bps_tests::program::Program;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A folder of a test's own, gone at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("bps-gpu-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("temporary files can be written");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Program {
    let mut all = vec![("LD_LIBRARY_PATH", fake_gpu::library_path().display().to_string())];
    all.extend(variables.iter().map(|&(name, value)| (name, value.to_owned())));
    Program::start("bps-test-gpu", arguments, &all)
}

/// How the program ended, in its own words.
fn end(mut program: Program) -> String {
    let line = program.wait_for_line("gpu ", LIMIT);
    program.wait(LIMIT);
    line
}

fn run(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    end(start(arguments, variables))
}

/// Starts so many ranks, and returns how each ended.
fn ranks(scenario: &str, count: u32, variables: &[(&str, &str)]) -> Vec<String> {
    let seeds: String = variables.iter().map(|(_, value)| *value).collect();
    let folder = Folder::new(&format!("{scenario}-{count}-{seeds}"));
    let file = folder.0.join("id").display().to_string();
    let member =
        |rank: u32| start(&[scenario, &rank.to_string(), &count.to_string(), &file], variables);
    let programs: Vec<Program> = (0..count).map(member).collect();
    programs.into_iter().map(end).collect()
}

#[track_caller]
fn assert_says(line: &str, words: &[&str]) {
    for word in words {
        assert!(line.contains(word), "no `{word}` in: {line}");
    }
}

#[test]
fn devices_say_who_they_are() {
    assert_says(&run(&["available"], &[]), &["ended: 4 GPUs"]);
    let line = run(&["open", "1"], &[("CUDA_VISIBLE_DEVICES", "0,3")]);
    assert_says(&line, &["Fake GPU at 0000:1e:00.0, CUDA 12.8, no. 3, 17179869184 of"]);
}

#[test]
fn what_is_missing_or_too_old_is_one_sentence() {
    let folder = Folder::new("broken");
    std::fs::write(folder.0.join("libcuda.so.1"), "this is no library, whatever its name says")
        .expect("temporary files can be written");
    let broken = folder.0.display().to_string();
    let line = run(&["available"], &[("LD_LIBRARY_PATH", &broken)]);
    assert_says(&line, &["failed: no NVIDIA driver here", "libcuda.so.1", "install the driver"]);
    let line = run(&["available"], &[("FAKE_CUDA_VERSION", "11080")]);
    assert_says(&line, &["too old", "CUDA 11.8", "CUDA 12.0 or later"]);
    let line = run(&["available"], &[("FAKE_GPU_COUNT", "0")]);
    assert_says(&line, &["no GPU 0", "sees 0"]);
    assert_says(&run(&["open", "4"], &[]), &["no GPU 4", "sees 4", "CUDA_VISIBLE_DEVICES"]);
    let line = run(&["available"], &[("FAKE_GPU_FAIL", "cuInit=803")]);
    assert_says(&line, &["cuInit failed", "(error 803)", "restart the machine"]);
    let line = run(&["nccl"], &[("FAKE_NCCL_VERSION", "21704")]);
    assert_says(&line, &["NCCL 2.17.4", "too old", "2.18.0", "BPS_NCCL_LIBRARY"]);
    let line = run(&["nccl", "/no/such/libnccl.so.2"], &[]);
    assert_says(&line, &["not found", "/no/such/libnccl.so.2", "BPS_NCCL_LIBRARY"]);
    assert_says(&run(&["nccl"], &[]), &["ended: NCCL 2.27.7 (", "fake-gpu/libnccl.so.2)"]);
}

#[test]
fn copies_keep_the_order_that_events_give() {
    for seed in ["1", "2", "3"] {
        let variables = [("FAKE_GPU_SEED", seed), ("FAKE_GPU_PINNED", "1")];
        let line = run(&["copies", "wait"], &variables);
        assert_says(&line, &["ended: 0 of 100 rounds were wrong"]);
    }
    // The stand-in shows what is forgotten.
    let line = run(&["copies", "no"], &[]);
    assert!(line.contains("gpu ended:") && !line.contains(" 0 of 100"), "{line}");
}

#[test]
fn kernels_are_found_and_launched_with_what_they_take() {
    let line = run(&["codecs"], &[]);
    assert_says(&line, &["ended: 1358 encodings, wrong: []"]);
    let line = run(&["kept"], &[("FAKE_GPU_DELAY_US", "0")]);
    assert_says(&line, &["ended: 1368 parts, wrong: []"]);
    let line = run(&["codecs"], &[("FAKE_GPU_FAIL", "cuModuleLoadData=222")]);
    assert_says(&line, &["failed: CUDA: cuModuleLoadData failed"]);
}

#[test]
fn calls_without_a_context_fail() {
    let line = run(&["context"], &[]);
    assert_says(&line, &["ended: CUDA: cuMemcpyDtoHAsync failed: CUDA_ERROR_INVALID_CONTEXT"]);
}

#[test]
fn memory_that_cannot_be_pinned_is_an_error() {
    assert_says(&run(&["pinned"], &[]), &["ended: 3145728 bytes"]);
    let line = run(&["pinned"], &[("FAKE_GPU_FAIL", "cuMemHostRegister=2")]);
    assert_says(&line, &["failed: CUDA: cuMemHostRegister failed", "out of memory", "end other"]);
}

#[test]
fn collectives_are_right_between_two_and_four_processes() {
    for (count, seed) in [(2, "1"), (4, "2"), (1, "3")] {
        for line in ranks("collectives", count, &[("FAKE_GPU_SEED", seed)]) {
            assert_says(&line, &["ended: 36 rounds were right"]);
        }
    }
}

/// The same on the GPUs of this machine, as far as it has some.
#[test]
fn real_gpus_copy_and_reduce() {
    let real = |arguments: &[&str]| end(Program::start("bps-test-gpu", arguments, &[]));
    let line = real(&["available"]);
    let Some(count) = line.strip_prefix("gpu ended: ").and_then(|rest| rest.split_once(' ')) else {
        println!("skipped: {line}");
        return;
    };
    let count: u32 = count.0.parse().expect("a number of GPUs");
    assert_says(&real(&["open", "0"]), &["ended: ", ":00.0, CUDA 1"]);
    assert_says(&real(&["copies", "wait"]), &["ended: 0 of 100 rounds were wrong"]);
    assert_says(&real(&["codecs"]), &["ended: 1358 encodings, wrong: []"]);
    assert_says(&real(&["kept"]), &["ended: 1368 parts, wrong: []"]);
    assert_says(&real(&["context"]), &["cuMemcpyDtoHAsync failed: CUDA_ERROR_INVALID_CONTEXT"]);
    assert_says(&real(&["pinned"]), &["ended: 3145728 bytes"]);
    let line = real(&["nccl"]);
    if !line.contains("gpu ended") {
        println!("skipped: the collectives: {line}");
        return;
    }
    for ranks in [1, 2, 4, 8].into_iter().filter(|&ranks| ranks <= count) {
        let folder = Folder::new(&format!("real-{ranks}"));
        let file = folder.0.join("id").display().to_string();
        let member = |rank: u32| {
            let arguments = ["collectives", &rank.to_string(), &ranks.to_string(), &file];
            Program::start("bps-test-gpu", &arguments, &[])
        };
        let programs: Vec<Program> = (0..ranks).map(member).collect();
        for line in programs.into_iter().map(end) {
            assert_says(&line, &["ended: 36 rounds were right"]);
        }
    }
    if count > 1 {
        let folder = Folder::new("real-late");
        let file = folder.0.join("id").display().to_string();
        assert_says(
            &real(&["late", "0", "2", &file]),
            &["NCCL's start on rank 0 of 2", "within 1 s"],
        );
    }
}

#[test]
fn ranks_that_disagree_are_found_out() {
    for line in ranks("disagree", 3, &[]) {
        assert_says(&line, &["ended: NCCL: ", "failed: invalid usage", "ranks disagree: call 1"]);
        assert_says(&line, &["count 1000", "rank 2", "count 999"]);
    }
}

#[test]
fn a_dead_peer_is_an_error_and_no_hang() {
    let lines = {
        let folder = Folder::new("die");
        let file = folder.0.join("id").display().to_string();
        let member = |rank: &str| start(&["die", rank, "3", &file], &[]);
        let mut dying = member("2");
        let others = [member("0"), member("1")];
        dying.wait(LIMIT);
        others.map(end)
    };
    for line in lines {
        assert_says(&line, &["ended: NCCL: ", "failed: remote process exited", "rank 2"]);
    }
}

#[test]
fn an_abort_ends_what_waits() {
    let lines = ranks("abort", 2, &[]);
    assert_says(&lines[0], &["ended: given up"]);
    assert_says(&lines[1], &["ended: rank 0 has gone"]);
}

#[test]
fn a_peer_that_never_comes_is_a_timeout() {
    let lines = ranks("late", 2, &[]);
    assert_says(&lines[0], &["failed: NCCL's start on rank 0 of 2", "within 1 s", "other ranks"]);
}

#[test]
fn errors_of_nccl_carry_what_it_says() {
    let lines = ranks("collectives", 2, &[("FAKE_GPU_FAIL", "ncclReduceScatter@3")]);
    // Both fail; the slower one may see first that the other is gone.
    let (gone, told): (Vec<&String>, Vec<&String>) =
        lines.iter().partition(|line| line.contains("remote process exited"));
    assert!(gone.len() <= 1, "{lines:?}");
    for line in told {
        assert_says(line, &["failed: NCCL: ncclReduceScatter failed: unhandled system error"]);
        assert_says(line, &["(error 2)", "NCCL_DEBUG=WARN"]);
    }
}
