//! The devices of this machine.

use std::ffi::{CStr, c_int};
use std::ptr::NonNull;

use crate::fabric::verbs::ffi::Library;
use crate::fabric::verbs::ffi::abi::*;
use crate::fabric::verbs::trouble::{Refusal, Step};

/// A device that the library lists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its name: `mlx5_0`, `rdma_en3`.
    pub name: String,
    /// Its transport's number: 0 InfiniBand and RoCE, 1 iWARP, 100 Thunderbolt.
    pub transport: i32,
}

impl Listed {
    /// Whether it is one of Apple's Thunderbolt devices, which only send into posted receives and must not be
    /// asked for anything else: a WRITE is taken for a SEND there.
    pub fn is_thunderbolt(&self) -> bool {
        self.transport == TRANSPORT_THUNDERBOLT || self.name.starts_with("rdma_en")
    }
}

/// The devices of this machine.
///
/// # Errors
/// When the library cannot say.
pub fn list(library: &'static Library) -> Result<Vec<Listed>, Refusal> {
    match DeviceList::get(library) {
        Ok(list) => Ok(list.devices().map(|d| list.describe(d)).collect()),
        // The system has no RDMA at all (on Linux: its module is not there), and so no device.
        Err(Refusal { number: libc::ENOSYS, .. }) => Ok(Vec::new()),
        Err(refusal) => Err(refusal),
    }
}

pub struct DeviceList {
    library: &'static Library,
    first: NonNull<*mut IbvDevice>,
    count: usize,
}

impl DeviceList {
    pub fn get(library: &'static Library) -> Result<Self, Refusal> {
        let mut count: c_int = 0;
        // SAFETY: writes the count; the result is checked.
        let first = unsafe { (library.get_device_list)(&mut count) };
        let Some(first) = NonNull::new(first) else {
            return Err(Refusal { device: library.name.clone(), step: Step::List, number: last_errno() });
        };
        Ok(DeviceList { library, first, count: count.max(0) as usize })
    }

    pub fn devices(&self) -> impl Iterator<Item = *mut IbvDevice> {
        // SAFETY: the library returned an array of `count` pointers that lives until it is freed.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }.iter().copied()
    }

    pub fn describe(&self, device: *mut IbvDevice) -> Listed {
        // SAFETY: a device of the list; its name is a C string that lives as long.
        unsafe {
            let name = (self.library.get_device_name)(device);
            let name = if name.is_null() {
                String::new()
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            };
            Listed { name, transport: (*device).transport_type }
        }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: from `get_device_list`, freed once. Open contexts do not need it.
        unsafe { (self.library.free_device_list)(self.first.as_ptr()) };
    }
}

pub fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The error number of a verb's result: some providers return it, some negate it, some set errno.
pub fn number(rc: c_int) -> i32 {
    if rc == -1 { last_errno() } else { rc.abs() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_numbers_are_positive() {
        assert_eq!((number(12), number(-12)), (12, 12));
    }

    #[test]
    fn apples_devices_by_name_or_transport() {
        let listed = |name: &str, transport| Listed { name: name.into(), transport };
        assert!(listed("rdma_en5", 0).is_thunderbolt() && listed("x", 100).is_thunderbolt());
        assert!(!listed("mlx5_0", 0).is_thunderbolt());
    }
}
