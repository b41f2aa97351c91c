/* The functions of CUDA's driver that cuda_shared.py calls, with memfds for device memory: by the
 * driver's own header, so that the compiler checks what they take. A call named by vmm_fail fails.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE = 1 << 16 };

static char failing[64];
static int live_handles;

void vmm_fail(const char *name) { strncpy(failing, name, sizeof failing - 1); }
int vmm_handles(void) { return live_handles; }
void vmm_sizes(size_t *sizes) {
    sizes[0] = sizeof(CUmemLocation);
    sizes[1] = sizeof(CUmemAllocationProp);
    sizes[2] = sizeof(CUmemAccessDesc);
}

#define MAY_FAIL \
    if (!strcmp(failing, __func__)) return CUDA_ERROR_INVALID_VALUE

static CUresult check(const CUmemAllocationProp *prop) {
    return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                   prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
                   prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && !prop->location.id &&
                   !prop->win32HandleMetaData
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    (void)error;
    *text = "invalid argument";
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option) {
    MAY_FAIL;
    (void)option;
    *granularity = PAGE;
    return check(prop);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
    MAY_FAIL;
    if (check(prop) || flags || size % PAGE) return CUDA_ERROR_INVALID_VALUE;
    int fd = memfd_create("vmm", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return CUDA_ERROR_OUT_OF_MEMORY;
    void *all = mmap(NULL, size, PROT_WRITE, MAP_SHARED, fd, 0);
    memset(all, 0xA5, size); /* nobody promises zeros */
    munmap(all, size);
    *handle = (CUmemGenericAllocationHandle)fd;
    live_handles++;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    live_handles--;
    return close((int)handle) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    MAY_FAIL;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return CUDA_ERROR_INVALID_VALUE;
    *(int *)shareable = dup((int)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                        CUmemAllocationHandleType type) {
    MAY_FAIL;
    int fd = dup((int)(uintptr_t)os_handle);
    if (fd < 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    *handle = (CUmemGenericAllocationHandle)fd;
    live_handles++;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                             unsigned long long flags) {
    MAY_FAIL;
    if (alignment || addr || flags) return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *ptr = (CUdeviceptr)(uintptr_t)at;
    return at == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    return munmap((void *)(uintptr_t)ptr, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    MAY_FAIL;
    struct stat found;
    if (flags || offset || fstat((int)handle, &found) || (size_t)found.st_size < size)
        return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, 0);
    return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    MAY_FAIL;
    if (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc->location.id ||
        desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    return mprotect((void *)(uintptr_t)ptr, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE
                                                                          : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
    void *at = mmap((void *)(uintptr_t)ptr, size, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Host memory at a second address, for the one device. */
enum { WINDOWS = 4 };
static struct { void *host, *device; size_t size; } windows[WINDOWS];

static int window_of(const void *host) {
    for (int i = 0; i < WINDOWS; i++)
        if (windows[i].host == host) return i;
    return -1;
}

CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned int flags) {
    MAY_FAIL;
    int at = window_of(NULL);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (flags != CU_MEMHOSTREGISTER_DEVICEMAP || bytesize % page || (uintptr_t)p % page || at < 0 ||
        window_of(p) >= 0)
        return CUDA_ERROR_INVALID_VALUE;
    void *device = mremap(p, 0, bytesize, MREMAP_MAYMOVE);
    if (device == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    windows[at].host = p;
    windows[at].device = device;
    windows[at].size = bytesize;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *pdptr, void *p, unsigned int flags) {
    MAY_FAIL;
    int at = window_of(p);
    if (flags || at < 0) return CUDA_ERROR_INVALID_VALUE;
    *pdptr = (CUdeviceptr)(uintptr_t)windows[at].device;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *p) {
    int at = window_of(p);
    if (at < 0) return CUDA_ERROR_INVALID_VALUE;
    munmap(windows[at].device, windows[at].size);
    windows[at].host = NULL;
    return CUDA_SUCCESS;
}
