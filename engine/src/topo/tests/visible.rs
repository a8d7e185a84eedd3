//! Tests of `topo/visible.rs` on fake roots.

use super::super::fixture::{self, Folder, expand};
use super::*;

/// Two sockets and eight GPUs, all with the driver's word and device files. Few CPUs will do: each
/// is dozens of files.
fn dgx() -> (Folder, Topology) {
    let cores = ["cores cpus=0-1 package=0 node=0", "cores cpus=2-3 package=1 node=1"];
    let devices = fixture::DGX.lines().filter(|line| line.starts_with("pci "));
    let lines: Vec<&str> = cores.into_iter().chain(devices).collect();
    let root = expand(&lines.join("\n"));
    let topology = Topology::read(root.path()).unwrap();
    for (minor, gpu) in topology.gpus.iter().enumerate() {
        information(&root, &gpu.address, minor, &format!("GPU-{minor}{minor}aa{minor}c0f-1111"));
        root.write(&format!("dev/nvidia{minor}"), "");
    }
    let topology = Topology::read(root.path()).unwrap();
    (root, topology)
}

fn information(root: &Folder, address: &str, minor: usize, uuid: &str) {
    let text = format!(
        "Model: \t\t NVIDIA H100\nIRQ:   \t\t 41\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}"
    );
    root.write(&format!("proc/driver/nvidia/gpus/{address}/information"), &text);
}

fn seen(present: &[Device], cuda: Option<&str>, nvidia: Option<&str>) -> Visible {
    visible(present, &Wishes { cuda, nvidia, order: None }).unwrap()
}

fn refused(present: &[Device], cuda: Option<&str>, nvidia: Option<&str>) -> VisibleError {
    visible(present, &Wishes { cuda, nvidia, order: None }).unwrap_err()
}

/// The device files' numbers, which are those of the PCI addresses here.
fn minors(visible: &Visible) -> Vec<u32> {
    let minor = |device: &Device| device.gpu.as_ref().unwrap().driver.as_ref().unwrap().minor;
    visible.devices.iter().map(minor).collect()
}

#[test]
fn the_drivers_word_is_read() {
    let (_root, topology) = dgx();
    let gpu = &topology.gpus[2];
    assert_eq!(gpu.address, "0000:52:00.0");
    assert_eq!(
        gpu.driver,
        Some(crate::topo::Driver {
            minor: 2,
            uuid: Some("GPU-22aa2c0f-1111".into()),
            model: Some("NVIDIA H100".into())
        })
    );
    let (root, _) = dgx();
    information(&root, "0000:1b:00.0", 0, "GPU-????????-????-????-????-????????????");
    // A device that /sys does not show.
    information(&root, "0000:FF:00.0", 9, "GPU-99");
    let topology = Topology::read(root.path()).unwrap();
    assert_eq!(topology.gpus.len(), 9);
    assert_eq!(topology.gpus[0].driver.as_ref().unwrap().uuid, None);
    assert_eq!((topology.gpus[8].address.as_str(), topology.gpus[8].node), ("0000:ff:00.0", None));
    assert_eq!(present(&topology, root.path()).len(), 8, "there is no file for the ninth");
}

#[test]
fn without_variables_all_gpus_with_device_files_are_seen() {
    let (root, topology) = dgx();
    let all = present(&topology, root.path());
    assert_eq!(minors(&seen(&all, None, None)), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(all[7].node, Some(1));
    assert_eq!(all[7].to_string(), "NVIDIA H100 at 0000:df:00.0");
    // A container that was given two GPUs: the driver still lists all eight.
    for minor in [0, 1, 2, 3, 6, 7] {
        std::fs::remove_file(root.path().join(format!("dev/nvidia{minor}"))).unwrap();
    }
    let some = present(&topology, root.path());
    for nvidia in [None, Some("4,5"), Some("all"), Some("void"), Some("")] {
        let seen = seen(&some, None, nvidia);
        assert_eq!((minors(&seen), seen.cuda), (vec![4, 5], None), "{nvidia:?}");
    }
    // One that was given none.
    for minor in [4, 5] {
        std::fs::remove_file(root.path().join(format!("dev/nvidia{minor}"))).unwrap();
    }
    assert!(present(&topology, root.path()).is_empty());
}

#[test]
fn without_the_driver_device_files_are_counted() {
    let root = expand(fixture::GPU_VM);
    let topology = Topology::read(root.path()).unwrap();
    assert!(present(&topology, root.path()).is_empty(), "a card that nobody drives is of no use");
    root.write("dev/nvidia0", "");
    root.write("dev/nvidiactl", "");
    root.write("dev/nvidia-uvm", "");
    let found = present(&topology, root.path());
    assert_eq!(found[0].to_string(), "NVIDIA GPU at 0000:00:06.0");
    root.write("dev/nvidia1", "");
    let found = present(&topology, root.path());
    assert_eq!(found, vec![Device { gpu: None, slice: None, node: None }; 2]);
    assert_eq!(found[0].to_string(), "place unknown");
}

#[test]
fn cuda_s_own_variable_has_the_last_word() {
    let (root, topology) = dgx();
    let all = present(&topology, root.path());
    for (cuda, expected) in [
        ("0", vec![0]),
        ("5,2", vec![5, 2]),
        (" 1 , 3 ", vec![1, 3]),
        ("0,2,-1,1", vec![0, 2]),
        ("GPU-33aa", vec![3]),
        ("gpu-33AA3c0f-1111", vec![]),
        ("GPU-77AA7C0F-1111,0", vec![7, 0]),
        ("", vec![]),
        ("-1", vec![]),
        ("none", vec![]),
        ("NoDevFiles", vec![]),
    ] {
        if cuda.starts_with("gpu-") {
            assert!(matches!(refused(&all, Some(cuda), None), VisibleError::Malformed { .. }));
            continue;
        }
        let seen = seen(&all, Some(cuda), None);
        assert_eq!((minors(&seen), seen.cuda), (expected, None), "{cuda:?}");
    }
    // BytePS's count is kept where it is smaller.
    assert_eq!(minors(&seen(&all, Some("4,5,6"), Some("0,1"))), [4, 5]);
    assert_eq!(minors(&seen(&all, Some("4,5"), Some("0,1,2,3"))), [4, 5]);
    assert_eq!(minors(&seen(&all, Some("4,5"), Some("all"))), [4, 5]);
}

#[test]
fn byteps_s_variable_is_followed_where_no_runtime_has() {
    let (root, topology) = dgx();
    let all = present(&topology, root.path());
    let two = seen(&all, None, Some("2,3"));
    assert_eq!(minors(&two), [2, 3]);
    assert_eq!(two.cuda.as_deref(), Some("GPU-22aa2c0f-1111,GPU-33aa3c0f-1111"));
    let one = seen(&all, None, Some("GPU-66"));
    assert_eq!((minors(&one), one.cuda.as_deref()), (vec![6], Some("GPU-66aa6c0f-1111")));
    let every = seen(&all, None, Some("7,6,5,4,3,2,1,0"));
    assert_eq!((minors(&every)[0], every.cuda), (0, None), "CUDA's order, not that of the list");
    // What mounts and device plugins write is their own affair.
    for word in ["/var/run/nvidia-container-devices", "nvidia.com/gpu=0", "all", "void", ""] {
        assert_eq!(seen(&all, None, Some(word)).devices.len(), 8, "{word}");
    }
    assert!(seen(&all, None, Some("none")).devices.is_empty());
    assert!(seen(&[], Some("0,1"), Some("0,1,2")).devices.is_empty(), "a machine without GPUs");
}

#[test]
fn processes_are_counted_by_entries() {
    for (value, count) in [
        (None, None),
        (Some("0"), Some(1)),
        (Some("0,1,2,3"), Some(4)),
        (Some("GPU-8a56,GPU-77b1,"), Some(2)),
        (Some("void"), None),
        (Some(" none "), None),
        (Some("all"), None),
        (Some(""), None),
    ] {
        assert_eq!(entries_of(value), count, "{value:?}");
    }
}

#[test]
fn slices_lead_to_their_gpu_where_that_is_known() {
    let (root, topology) = dgx();
    let all = present(&topology, root.path());
    // The older names have the GPU in them.
    let old = seen(&all, Some("MIG-GPU-55aa5c0f-1111/7/0"), None);
    assert_eq!((minors(&old), old.devices[0].node), (vec![5], Some(1)));
    assert_eq!(
        old.devices[0].to_string(),
        "MIG-GPU-55aa5c0f-1111/7/0 of NVIDIA H100 at 0000:c3:00.0"
    );
    assert_eq!(old.note, None);
    // The newer ones do not: nothing is known on a machine of two sockets.
    let new = seen(&all, Some("MIG-c7384736,MIG-9a0b"), None);
    assert_eq!(new.devices.len(), 2);
    assert_eq!((new.devices[0].gpu.as_ref(), new.devices[0].node), (None, None));
    assert_eq!(new.devices[0].to_string(), "MIG-c7384736");
    assert!(new.note.unwrap().contains("its own as GPU 0"));
    // If all GPUs are on one node, the slice is there too; of one GPU, it is that one's.
    let near = seen(&all[4..], Some("MIG-c7384736"), None);
    assert_eq!((near.devices[0].gpu.as_ref(), near.devices[0].node), (None, Some(1)));
    let only = seen(&all[6..7], None, Some("0:0,0:1"));
    assert_eq!((minors(&only), only.cuda), (vec![6, 6], None));
    assert_eq!(only.devices[1].to_string(), "0:1 of NVIDIA H100 at 0000:d1:00.0");
    // A container's runtime counts as the machine does: GPU 5 is not the container's sixth.
    let elsewhere = seen(&all[6..], None, Some("5:0"));
    assert_eq!((elsewhere.devices[0].gpu.as_ref(), elsewhere.devices[0].node), (None, Some(1)));
}

#[test]
fn an_identifier_that_the_driver_has_not_told_leads_nowhere_in_particular() {
    let (root, _) = dgx();
    information(&root, "0000:9d:00.0", 4, "GPU-????????-????");
    let topology = Topology::read(root.path()).unwrap();
    let all = present(&topology, root.path());
    let seen = seen(&all, Some("GPU-0b1d"), None);
    assert_eq!(seen.devices, [Device { gpu: None, slice: None, node: None }]);
    assert!(matches!(refused(&all, Some("8"), None), VisibleError::Unknown { .. }));
}

#[test]
fn what_cannot_be_followed_is_said() {
    let (root, topology) = dgx();
    let all = present(&topology, root.path());
    let says = |error: VisibleError, parts: &[&str]| {
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    let error = refused(&all, Some("0,9"), None);
    assert!(matches!(&error, VisibleError::Unknown { entry, .. } if entry == "9"));
    says(error, &["CUDA_VISIBLE_DEVICES=0,9 names GPU '9'", "8 GPUs: 0 (NVIDIA H100 at 0000:1b"]);
    says(refused(&all, Some("GPU-fe"), None), &["'GPU-fe'", "GPU-77aa7c0f-1111"]);
    says(refused(&all, None, Some("0,12")), &["NVIDIA_VISIBLE_DEVICES=0,12 names GPU '12'"]);
    says(refused(&all, Some("MIG-GPU-fe/1/0"), None), &["'MIG-GPU-fe/1/0'"]);
    says(refused(&all, Some("GPU-"), None), &["identifiers of 8 GPUs begin with 'GPU-'"]);
    says(refused(&all, Some("1,1"), None), &["names '1' twice"]);
    says(refused(&all, None, Some("1,GPU-11")), &["names 'GPU-11' twice"]);
    for bad in ["all", "0,all", "0:1", "1;2", "0,,1"] {
        let error = refused(&all, Some(bad), None);
        assert!(matches!(error, VisibleError::Malformed { .. }), "{bad}: {error}");
    }
    let error = refused(&all[..2], None, Some("0,1,2"));
    assert!(matches!(error, VisibleError::Fewer { count: 3, found: 2, .. }));
    says(error, &["asks for 3 GPUs", "there are 2", "BYTEPS_LOCAL_SIZE"]);
}

#[test]
fn unlike_gpus_are_counted_by_address_only_where_cuda_is_told_to() {
    let (root, _) = dgx();
    let path = "proc/driver/nvidia/gpus/0000:1b:00.0/information";
    root.write(path, "Model: \t NVIDIA A10\nGPU UUID: \t GPU-00\nDevice Minor: \t 0");
    let topology = Topology::read(root.path()).unwrap();
    let all = present(&topology, root.path());
    assert!(seen(&all, None, None).note.unwrap().contains("CUDA_DEVICE_ORDER=PCI_BUS_ID"));
    assert_eq!(seen(&all, Some("GPU-00"), None).note, None);
    let wishes = Wishes { order: Some("PCI_BUS_ID"), ..Wishes::default() };
    assert_eq!(visible(&all, &wishes).unwrap().note, None);
}
