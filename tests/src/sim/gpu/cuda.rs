//! The functions of libcuda, for the machine of the calling thread.

use super::machine::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, Machine, host_bytes};
use super::memory::{Access, POISON};
use super::stream::Work;
use super::with;
use bps_fake_gpu::kernels::{self, Coding, Launch};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

/// Handles are apart, so that one is never taken for another.
const CONTEXT: usize = 0xc000_0000;
pub(super) const STREAM: usize = 0x5000_0000;
const EVENT: usize = 0xe000_0000;
const HANDLE: usize = 16;
/// `CUDA_ERROR_NOT_INITIALIZED`, `CUDA_ERROR_NOT_READY`, `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_INITIALIZED: u32 = 3;
const NOT_READY: u32 = 600;
const NOT_SUPPORTED: u32 = 801;

/// The index that a handle stands for.
pub(super) fn index(handle: usize, base: usize, count: usize) -> Option<usize> {
    let index = handle.checked_sub(base)? / HANDLE;
    (index < count).then_some(index)
}

pub(super) fn handle(index: usize, base: usize) -> usize {
    base + index * HANDLE
}

/// One of `CUstreamBatchMemOpParams`, of which the engine uses waits for words alone.
#[repr(C)]
struct Wait {
    operation: c_uint,
    at: u64,
    value: u32,
    _upper: u32,
    flags: c_uint,
    _alias: u64,
    _rest: u64,
}

/// `CU_STREAM_MEM_OP_WAIT_VALUE_32`, `CU_STREAM_WAIT_VALUE_GEQ`.
const WAIT: c_uint = 1;
const AT_LEAST: c_uint = 0;
const _: () = assert!(size_of::<Wait>() == 48, "as large as the union of the header");

fn put<T>(at: *mut T, value: T) -> Result<(), u32> {
    let at = NonNull::new(at).ok_or(INVALID_VALUE)?;
    // SAFETY: the engine passes the address of a variable of its own.
    unsafe { at.write(value) };
    Ok(())
}

impl Machine {
    /// The device whose context the thread has.
    pub(super) fn current(&self) -> Result<usize, u32> {
        let context = self.contexts.last().copied().ok_or(INVALID_CONTEXT)?;
        index(context, CONTEXT, self.devices.len()).ok_or(INVALID_CONTEXT)
    }

    /// A stream by its handle; an error if its device has failed. Of a process that has died, none
    /// is good any more.
    pub(super) fn stream_of(&self, stream: usize) -> Result<usize, u32> {
        let stream = index(stream, STREAM, self.streams.len()).ok_or(INVALID_HANDLE)?;
        self.standing(self.streams[stream].device).map(|()| stream)
    }

    /// As [`stream_of`](Self::stream_of), for what may not come in between while NCCL enqueues
    /// there: where it stands then is nobody's promise. Of marks behind earlier work any place is
    /// right.
    fn still_stream_of(&mut self, stream: usize) -> Result<usize, u32> {
        let stream = self.stream_of(stream)?;
        let is_pending = |call: &(_, super::communicator::Share)| call.1.stream == stream;
        let mut pending = self.comms.iter().filter_map(|comm| comm.pending.as_ref());
        if pending.any(|calls| calls.iter().any(is_pending)) {
            self.blame(Err("a stream is used while NCCL enqueues in it".into()));
        }
        Ok(stream)
    }

    fn standing(&self, device: usize) -> Result<(), u32> {
        let one = &self.devices[device];
        one.failure.map_or(Ok(()), Err)?;
        if one.is_dead { Err(INVALID_CONTEXT) } else { Ok(()) }
    }

    /// A stream into which the thread may copy, and its device.
    fn copying(&mut self, stream: usize) -> Result<usize, u32> {
        let stream = self.still_stream_of(stream)?;
        let current = self.current()?;
        if self.streams[stream].device == current { Ok(stream) } else { Err(INVALID_CONTEXT) }
    }

    /// A copy to the host, or a kernel that encodes what is copied.
    fn copy_down(
        &mut self,
        stream: usize,
        (host, length): (usize, usize),
        (from, bytes): (u64, usize),
        kernel: Option<Coding>,
    ) {
        self.pinned(host, length);
        // What was there may be on its way to the device yet: then it is poisoned as this begins.
        if !self.is_source(stream, host, length) {
            // SAFETY: it is registered, so it is mapped; there is one thread.
            unsafe { host_bytes(host, length) }.fill(POISON);
        }
        let leaves_rest = kernel.is_some_and(|kernel| kernel.leaves_rest());
        let source = if leaves_rest { Access::write } else { Access::read };
        let accesses = [source(from, bytes), Access::write(host as u64, length)];
        let work = Work::ToHost { host, from, bytes: vec![0; bytes], kernel, rest: Vec::new() };
        self.enqueue(stream, "a copy to the host", work, &accesses);
    }

    /// A copy to the device, or a kernel that decodes what is copied.
    fn copy_up(
        &mut self,
        stream: usize,
        (to, bytes): (u64, usize),
        (host, length): (usize, usize),
        kernel: Option<Coding>,
    ) {
        self.pinned(host, length);
        let awaits = self.streams[stream].awaits_host > 0;
        self.streams[stream].awaits_host -= usize::from(awaits);
        // SAFETY: it is registered, so it is mapped; there is one thread.
        let seen = (!awaits).then(|| unsafe { host_bytes(host, length) }.to_vec());
        let mut accesses = [Access::read(host as u64, length), Access::write(to, bytes)];
        accesses.iter_mut().for_each(|access| access.is_later = awaits);
        let work = Work::ToDevice { to: (to, bytes), host: (host, length), seen, kernel };
        self.enqueue(stream, "a copy to the device", work, &accesses);
    }

    /// A kernel of the engine's.
    fn launch(&mut self, stream: usize, launch: Launch) -> Result<(), u32> {
        let accesses = match launch {
            Launch::Codec(of) => {
                let wire = usize::try_from(of.wire).map_err(|_| INVALID_VALUE)?;
                let (tensor, wire) = ((of.tensor, of.tensor_bytes()), (wire, of.wire_bytes()));
                match of.encodes() {
                    true => self.copy_down(stream, wire, tensor, Some(of)),
                    false => self.copy_up(stream, tensor, wire, Some(of)),
                }
                return Ok(());
            }
            Launch::Gather(of) => {
                let mut accesses = vec![
                    Access::read(of.tensor, of.tensor_bytes()),
                    Access::write(of.values, of.values_bytes()),
                ];
                if of.velocity != 0 {
                    accesses.push(Access::write(of.velocity, of.values_bytes()));
                }
                accesses
            }
            Launch::Scale { elements, values, .. } => {
                vec![Access::write(values, elements * size_of::<f32>())]
            }
        };
        let work = Work::Kernel { launch, results: Vec::new() };
        self.enqueue(stream, "a kernel of what is kept", work, &accesses);
        Ok(())
    }

    fn pinned(&mut self, at: usize, bytes: usize) {
        if !self.memory.is_registered(at as u64, bytes) {
            self.blame(Err("a copy uses memory of the host that is not registered".into()));
        }
    }
}

macro_rules! cuda {
    ($(fn $name:ident($machine:ident $(, $argument:ident: $type:ty)* $(,)?) $body:block)*) => {
        $(
            #[allow(non_snake_case, reason = "the names are those of the C functions")]
            extern "C" fn $name($($argument: $type),*) -> c_uint {
                let body = |$machine: &mut Machine| -> Result<(), u32> { $body };
                with(body).unwrap_or(Err(NOT_INITIALIZED)).err().unwrap_or(0)
            }
        )*

        /// The function of this name.
        pub(super) fn find(name: &str) -> Option<NonNull<c_void>> {
            let at = match name {
                $(stringify!($name) => $name as *mut c_void,)*
                "cuInit" => init as *mut c_void,
                "cuDriverGetVersion" => version as *mut c_void,
                "cuGetErrorName" | "cuGetErrorString" => text as *mut c_void,
                "cuDeviceGetAttribute" | "cuMemAlloc_v2" | "cuMemFree_v2" | "cuMemGetInfo_v2"
                | "cuMemGetHandleForAddressRange" | "cuFlushGPUDirectRDMAWrites" => {
                    unsupported as *mut c_void
                }
                _ => return None,
            };
            NonNull::new(at)
        }
    };
}

extern "C" fn init(_flags: c_uint) -> c_uint {
    0
}

extern "C" fn version(at: *mut c_int) -> c_uint {
    put(at, 12_080).err().unwrap_or(0)
}

extern "C" fn text(_code: c_uint, at: *mut *const c_char) -> c_uint {
    put(at, c"as the simulation has it".as_ptr()).err().unwrap_or(0)
}

/// For functions that the pipeline does not call; it takes whatever arguments they have.
extern "C" fn unsupported() -> c_uint {
    NOT_SUPPORTED
}

cuda! {
    fn cuDeviceGetCount(machine, count: *mut c_int) {
        put(count, c_int::try_from(machine.devices.len()).expect("few devices"))
    }
    fn cuDeviceGet(_machine, device: *mut c_int, ordinal: c_int) {
        put(device, ordinal)
    }
    fn cuDeviceGetName(_machine, name: *mut c_char, _length: c_int, _device: c_int) {
        put(name, 0)
    }
    fn cuDeviceGetPCIBusId(_machine, name: *mut c_char, _length: c_int, _device: c_int) {
        put(name, 0)
    }
    fn cuDeviceGetUuid_v2(_machine, uuid: *mut [u8; 16], _device: c_int) {
        put(uuid, [0; 16])
    }
    fn cuDevicePrimaryCtxRetain(_machine, context: *mut usize, device: c_int) {
        let device = usize::try_from(device).map_err(|_| INVALID_VALUE)?;
        put(context, handle(device, CONTEXT))
    }
    fn cuDevicePrimaryCtxRelease_v2(_machine, _device: c_int) {
        Ok(())
    }
    fn cuCtxSetCurrent(machine, context: usize) {
        machine.contexts = vec![context];
        Ok(())
    }
    fn cuCtxPushCurrent_v2(machine, context: usize) {
        machine.contexts.push(context);
        Ok(())
    }
    fn cuCtxPopCurrent_v2(machine, context: *mut usize) {
        put(context, machine.contexts.pop().ok_or(INVALID_CONTEXT)?)
    }
    fn cuCtxGetStreamPriorityRange(_machine, least: *mut c_int, greatest: *mut c_int) {
        put(least, 0)?;
        put(greatest, -5)
    }
    fn cuStreamCreateWithPriority(machine, at: *mut usize, _flags: c_uint, _priority: c_int) {
        let device = machine.current()?;
        let stream = machine.create_stream(device);
        put(at, handle(stream, STREAM))
    }
    fn cuStreamDestroy_v2(_machine, _stream: usize) {
        // What is enqueued is still done.
        Ok(())
    }
    fn cuStreamQuery(machine, stream: usize) {
        let stream = machine.stream_of(stream)?;
        if machine.query_stream(stream) { Ok(()) } else { Err(NOT_READY) }
    }
    fn cuStreamWaitEvent(machine, stream: usize, event: usize, _flags: c_uint) {
        let stream = machine.still_stream_of(stream)?;
        let event = index(event, EVENT, usize::MAX).ok_or(INVALID_HANDLE)?;
        machine.wait(stream, event)
    }
    fn cuStreamWriteValue32_v2(machine, stream: usize, at: u64, value: u32, _flags: c_uint) {
        let stream = machine.stream_of(stream)?;
        let at = usize::try_from(at).map_err(|_| INVALID_VALUE)?;
        machine.pinned(at, 4);
        machine.enqueue(stream, "a mark", Work::Write { at, value }, &[]);
        Ok(())
    }
    fn cuStreamBatchMemOp_v2(
        machine,
        stream: usize,
        count: c_uint,
        waits: *const Wait,
        _flags: c_uint,
    ) {
        let stream = machine.still_stream_of(stream)?;
        // SAFETY: the engine passes an array of so many.
        for wait in unsafe { std::slice::from_raw_parts(waits, count as usize) } {
            let at = usize::try_from(wait.at).map_err(|_| INVALID_VALUE)?;
            if (wait.operation, wait.flags) != (WAIT, AT_LEAST) {
                return Err(NOT_SUPPORTED);
            }
            machine.pinned(at, 4);
            machine.streams[stream].awaits_host += 1;
            let wait = Work::Await { at, value: wait.value };
            machine.enqueue(stream, "a wait for the host", wait, &[]);
        }
        Ok(())
    }
    fn cuEventCreate(machine, at: *mut usize, _flags: c_uint) {
        let device = machine.current()?;
        let event = machine.create_event(device);
        put(at, handle(event, EVENT))
    }
    fn cuEventRecord(machine, event: usize, stream: usize) {
        let stream = machine.stream_of(stream)?;
        let event = index(event, EVENT, usize::MAX).ok_or(INVALID_HANDLE)?;
        machine.record(event, stream)
    }
    fn cuEventQuery(machine, event: usize) {
        let event = index(event, EVENT, usize::MAX).ok_or(INVALID_HANDLE)?;
        if machine.query_event(event)? { Ok(()) } else { Err(NOT_READY) }
    }
    fn cuEventDestroy_v2(_machine, _event: usize) {
        // What waits for it does so for its last mark.
        Ok(())
    }
    fn cuMemHostRegister_v2(machine, at: usize, bytes: usize, _flags: c_uint) {
        machine.memory.register(at as u64, bytes);
        Ok(())
    }
    fn cuMemHostUnregister(machine, at: usize) {
        machine.unregister(at as u64);
        Ok(())
    }
    fn cuMemcpyDtoHAsync_v2(machine, host: usize, from: u64, bytes: usize, stream: usize) {
        let stream = machine.copying(stream)?;
        machine.copy_down(stream, (host, bytes), (from, bytes), None);
        Ok(())
    }
    fn cuMemcpyHtoDAsync_v2(machine, to: u64, host: usize, bytes: usize, stream: usize) {
        let stream = machine.copying(stream)?;
        machine.copy_up(stream, (to, bytes), (host, bytes), None);
        Ok(())
    }
    fn cuMemcpyBatchAsync(
        machine,
        to: *const u64,
        from: *const u64,
        bytes: *const usize,
        count: usize,
        _attributes: *const c_void,
        _first: *const usize,
        _kinds: usize,
        _failed: *mut usize,
        stream: usize,
    ) {
        let stream = machine.copying(stream)?;
        // SAFETY: the engine passes arrays of so many.
        let [to, from] = [to, from].map(|at| unsafe { std::slice::from_raw_parts(at, count) });
        // SAFETY: the engine passes as many numbers as copies.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, count) };
        for ((&to, &from), &bytes) in to.iter().zip(from).zip(bytes) {
            let host = |at: u64| usize::try_from(at).map_err(|_| INVALID_VALUE);
            match machine.memory.is_registered(to, bytes) {
                true => machine.copy_down(stream, (host(to)?, bytes), (from, bytes), None),
                false => {
                    machine.up_together += u64::from(count > 1);
                    machine.copy_up(stream, (to, bytes), (host(from)?, bytes), None);
                }
            }
        }
        Ok(())
    }
    fn cuMemAllocAsync(machine, at: *mut u64, bytes: usize, stream: usize) {
        machine.copying(stream)?;
        put(at, machine.memory.allocate(bytes))
    }
    fn cuMemFreeAsync(machine, at: u64, stream: usize) {
        machine.copying(stream)?;
        machine.free(at);
        Ok(())
    }
    fn cuMemsetD8Async(machine, at: u64, value: u8, bytes: usize, stream: usize) {
        let stream = machine.copying(stream)?;
        let work = Work::Fill { at, bytes: vec![value; bytes] };
        machine.enqueue(stream, "zeros", work, &[Access::write(at, bytes)]);
        Ok(())
    }
    fn cuModuleLoadData(machine, module: *mut usize, image: *const c_void) {
        machine.current()?;
        // SAFETY: the engine's PTX is a C string.
        unsafe { kernels::load(module, image) }
    }
    fn cuModuleUnload(_machine, _module: usize) {
        Ok(())
    }
    fn cuModuleGetFunction(_machine, function: *mut usize, module: usize, name: *const c_char) {
        // SAFETY: names are C strings.
        unsafe { kernels::get(function, module, name) }
    }
    fn cuLaunchKernel(
        machine,
        function: usize,
        x: c_uint,
        y: c_uint,
        z: c_uint,
        threads_x: c_uint,
        threads_y: c_uint,
        threads_z: c_uint,
        _shared: c_uint,
        stream: usize,
        arguments: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        let (grid, block) = ([x, y, z], [threads_x, threads_y, threads_z]);
        // SAFETY: the engine gives the arguments that its kernels have.
        let launch = unsafe { kernels::launch(function, grid, block, arguments) }?;
        let stream = machine.copying(stream)?;
        machine.launch(stream, launch)
    }
    fn cuMemcpyDtoDAsync_v2(machine, to: u64, from: u64, bytes: usize, stream: usize) {
        let stream = machine.copying(stream)?;
        let accesses = [Access::read(from, bytes), Access::write(to, bytes)];
        let work = Work::OnDevice { to, from, bytes: vec![0; bytes] };
        machine.enqueue(stream, "a copy on the device", work, &accesses);
        Ok(())
    }
}
