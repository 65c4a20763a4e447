int ks_version(void){return 1;}
